from __future__ import annotations

import ctypes
import os

import pytest

from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda.device import bound
from kvferry.cuda.driver import driver, initialised_driver, load_driver, set_driver_for_testing
from kvferry.cuda.functions import (
    FUNCTIONS,
    HANDLE_BYTES,
    AccessDescriptor,
    AllocationProperties,
    IpcHandle,
    Uuid,
)
from kvferry.errors import CudaError, CudaUnavailableError


@pytest.mark.parametrize(
    ("structure", "size"),
    [(Uuid, 16), (IpcHandle, HANDLE_BYTES), (AllocationProperties, 32), (AccessDescriptor, 12)],
)
def test_structures_have_the_sizes_of_the_c_interface(structure: type[ctypes.Structure], size: int) -> None:
    assert ctypes.sizeof(structure) == size


def test_fields_of_the_allocation_properties_lie_where_c_puts_them() -> None:
    offsets = {name: getattr(AllocationProperties, name).offset for name, _ in AllocationProperties._fields_}
    assert offsets == {"type": 0, "requested_handle_types": 4, "location": 8, "win32_metadata": 16, "flags": 24}


def test_the_double_has_every_function_of_the_table() -> None:
    missing = [name for name in FUNCTIONS if not FakeDriver().has(name)]
    assert missing == []


def test_an_error_names_call_code_and_device() -> None:
    with installed() as double, pytest.raises(CudaError) as caught:
        double.retain_primary_context(7)
    assert caught.value.code == 101
    assert caught.value.call == "cuDeviceGet"
    assert caught.value.device == 7
    assert "CUDA_ERROR_INVALID_DEVICE" in str(caught.value)
    assert "device 7" in str(caught.value)


def test_a_function_that_the_driver_lacks_is_named() -> None:
    double = FakeDriver()
    del double._functions["cuMemExportToShareableHandle"]
    with pytest.raises(CudaError, match=r"cuMemExportToShareableHandle.*newer driver"):
        double.export_posix_fd(1)


def test_without_a_driver_the_reason_is_given() -> None:
    set_driver_for_testing(None)
    if load_driver() is not None:
        pytest.skip("this machine has a CUDA driver")
    assert initialised_driver() is None
    with pytest.raises(CudaUnavailableError, match=r"libcuda.so.1|driver|device"):
        driver()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_by_name() -> None:
    with installed():
        driver()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = b"no error"
            try:
                assert load_driver() is None
                with bound(0):
                    pass
            except CudaUnavailableError as error:
                text = str(error).encode()
            os.write(write_end, text)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as reader:
            text = reader.read()  # type: ignore[assignment]
        os.waitpid(pid, 0)
    assert "forked" in str(text)
    assert "spawn" in str(text)


def test_a_context_is_retained_once_a_device() -> None:
    with installed((0, 1)) as double:
        for _ in range(3):
            with bound(1), bound(0):
                pass
        assert double.fake.calls["cuDevicePrimaryCtxRetain"] == 2
