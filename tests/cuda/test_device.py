from __future__ import annotations

import threading

import pytest

from doubles.fake_base import uuid_of
from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda.device import bound, bound_if_any, device_uuid, ordinal_of, visible_uuids
from kvferry.errors import CudaError, UnknownDeviceError


def test_uuids_follow_the_order_in_which_devices_are_visible() -> None:
    with installed((1, 0)):
        first, second = visible_uuids()
    with installed((0, 1)):
        assert ordinal_of(first) == 1
        assert ordinal_of(second) == 0


def test_a_uuid_is_written_as_nvidia_smi_does() -> None:
    with installed((3,)):
        text = device_uuid(0)
    assert text.startswith("GPU-")
    assert text.removeprefix("GPU-").replace("-", "") == uuid_of(3).hex()
    assert [len(part) for part in text.split("-")] == [3, 8, 4, 4, 4, 12]


def test_a_mig_instance_has_a_mig_uuid() -> None:
    with installed(mig=True):
        assert device_uuid(0).startswith("MIG-")
        assert ordinal_of(device_uuid(0)) == 0


def test_an_invisible_device_is_refused_with_those_that_are_visible() -> None:
    with installed((1,)):
        hidden = device_uuid(0)
    with installed((0,)), pytest.raises(UnknownDeviceError) as caught:
        ordinal_of(hidden)
    assert hidden in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


def test_a_fresh_thread_is_bound_and_left_without_a_context() -> None:
    seen: list[int] = []

    def work(double: FakeDriver) -> None:
        seen.append(double.current_context())
        with bound(1) as drv:
            drv.mem_free(drv.mem_alloc(512))
            seen.append(double.fake.device())
        seen.append(double.current_context())

    with installed((0, 1)) as double:
        thread = threading.Thread(target=work, args=(double,))
        thread.start()
        thread.join(timeout=10)
    assert seen == [0, 1, 0]


def test_a_threads_own_context_is_restored_also_after_an_error() -> None:
    with installed((0, 1)) as double:
        double.push_context(double.primary_context(1))
        before = double.current_context()
        with pytest.raises(CudaError), bound(0) as drv:
            drv.mem_free(12345)
        assert double.current_context() == before


def test_without_any_active_context_nothing_is_bound_nor_begun() -> None:
    with installed((0, 1)) as double:
        with bound_if_any(double) as any_context:
            assert not any_context
        assert not double.fake.active
        with bound(1):
            pass
        with bound_if_any(double) as any_context:
            assert any_context
            assert double.fake.device() == 1
