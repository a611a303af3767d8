"""The one place that calls into libcuda and looks at what it returned."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from kvferry.cuda.functions import FUNCTIONS, NOT_FOUND, SUCCESS
from kvferry.errors import CudaError, CudaUnavailableError


class Library:
    """libcuda, or a double of it, with one check for every call.

    The real library is a `ctypes.CDLL`, so that the GIL is released while a call runs. Of a double only attributes with
    the functions' names are used.
    """

    def __init__(self, functions: Any) -> None:
        self._functions: dict[str, Any] = {}
        self.pid = os.getpid()
        for name, argument_types in FUNCTIONS.items():
            function = getattr(functions, name, None)
            if function is None:
                continue
            if isinstance(functions, ctypes.CDLL):
                function.argtypes = argument_types
                function.restype = ctypes.c_int
            self._functions[name] = function

    @property
    def usable(self) -> bool:
        """False in a child that was forked after CUDA was in use: the driver's state does not survive a fork."""
        return os.getpid() == self.pid

    def has(self, name: str) -> bool:
        return name in self._functions

    def result(self, name: str, *args: Any) -> int:
        """The bare CUresult of a call, for those where another code than success is an answer."""
        if not self.usable:
            raise CudaUnavailableError(
                f"process {os.getpid()} was forked after its parent {self.pid} began to use CUDA, and cannot use it: "
                "start child processes with the spawn method"
            )
        function = self._functions.get(name)
        if function is None:
            raise CudaError(name, NOT_FOUND, "this driver has no such function: a newer driver is needed")
        return int(function(*args))

    def call(self, name: str, *args: Any, device: int | None = None) -> None:
        """Call, and raise CudaError unless it succeeded."""
        code = self.result(name, *args)
        if code != SUCCESS:
            raise self.error(name, code, device)

    def error(self, name: str, code: int, device: int | None = None) -> CudaError:
        texts = []
        for getter in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self.has(getter) and self.result(getter, code, ctypes.byref(text)) == SUCCESS and text.value:
                texts.append(text.value.decode("utf-8", "replace"))
        return CudaError(name, code, ": ".join(texts) or "unknown error", device)
