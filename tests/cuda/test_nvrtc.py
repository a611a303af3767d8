from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda import nvrtc_library
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.cuda.nvrtc import Module, compile_ptx
from kvferry.cuda.stream import Stream
from kvferry.errors import CudaError, CudaUnavailableError


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver


def fill(places: list[int]) -> Callable[[], None]:
    """The double's kernel `fill(address, nbytes, value)`; it reads its arguments when it is launched."""
    address = ctypes.c_uint64.from_address(places[0]).value
    nbytes = ctypes.c_uint32.from_address(places[1]).value
    value = ctypes.c_uint8.from_address(places[2]).value

    def run() -> None:
        ctypes.memset(address, value, nbytes)

    return run


def test_a_kernel_is_compiled_loaded_and_launched(double: FakeDriver) -> None:
    double.fake.kernels["fill"] = fill
    with bound(0) as drv:
        address = drv.mem_alloc(64)
    with Module(compile_ptx("source", 0), 0) as module, Stream(0) as stream:
        args = [ctypes.c_uint64(address), ctypes.c_uint32(16), ctypes.c_uint8(9)]
        module.function("fill").launch((1, 1, 1), (32, 1, 1), stream=stream.handle, args=args)
        stream.synchronize()
    assert tensor_from_pointer(address, 17, device=0, owner=None).tolist() == [9] * 16 + [0]


def test_an_unknown_kernel_is_an_error(double: FakeDriver) -> None:
    with Module(b"ptx", 0) as module, pytest.raises(CudaError, match="cuModuleGetFunction"):
        module.function("absent")


def test_a_missing_compiler_is_named_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_library, "_candidates", lambda: iter(["libnvrtc-absent.so"]))
    nvrtc_library._library.cache_clear()
    with pytest.raises(CudaUnavailableError, match=r"libnvrtc-absent.so.*pip install nvidia-cuda-nvrtc"):
        nvrtc_library.compile_source("", "compute_90")
    nvrtc_library._library.cache_clear()
