"""Kernels compiled at run time: source to PTX, PTX to functions, functions to launches."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvferry.cuda.device import bound
from kvferry.cuda.driver import driver

if TYPE_CHECKING:
    from typing_extensions import Self


def compile_ptx(source: str, device: int) -> bytes:
    """PTX of CUDA C++ `source` for the device's architecture; takes tens of milliseconds, so keep the result.

    Raises:
        CudaError: it does not compile; the text holds the compiler's log.
        CudaUnavailableError: no driver, or no libnvrtc.
    """
    return driver().compile_ptx(source, device)


class Function:
    """One kernel of a loaded module, valid while the module is."""

    def __init__(self, module: Module, name: str, handle: int) -> None:
        self.name = name
        self._module = module
        self._handle = handle

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], *, stream: int, args: Sequence[Any]
    ) -> None:
        """Put the kernel into `stream`; returns at once. `args` are ctypes values, in the order of its parameters."""
        assert all(isinstance(arg, ctypes._SimpleCData) for arg in args), "kernel arguments have to be ctypes values"
        with bound(self._module.device) as drv:
            drv.launch(self._handle, args, grid=grid, block=block, stream=stream)


class Module:
    """Compiled code loaded into one device's context."""

    def __init__(self, ptx: bytes, device: int) -> None:
        self.device = device
        self._closed = False
        with bound(device) as drv:
            self._handle = drv.module_load(ptx)

    def function(self, name: str) -> Function:
        """The kernel `name`, declared `extern "C"`."""
        with bound(self.device) as drv:
            return Function(self, name, drv.module_function(self._handle, name))

    def close(self) -> None:
        """Unload; the kernels must not be running. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with bound(self.device) as drv:
            drv.module_unload(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not self._closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<Module on device {self.device}, {'closed' if self._closed else 'loaded'}>"
