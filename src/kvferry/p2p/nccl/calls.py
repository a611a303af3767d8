"""The one place that loads an NCCL library, calls into it, and looks at what it returned."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import NcclCallError, NcclLibraryError
from kvferry.p2p.nccl.finding import find_nccl_library
from kvferry.p2p.nccl.functions import CONFIG_VERSION, FUNCTIONS, SUCCESS


class NcclCalls:
    """A loaded NCCL library, with one check for every call. Calls release the GIL.

    However often it is named, and by whatever name, a file is loaded and bound once in a process.
    """

    def __init__(self, so_file: str | None = None) -> None:
        self.so_file = so_file or find_nccl_library()
        self._functions = _load(self.so_file)
        self.version = self._version()
        if self.version < CONFIG_VERSION:
            raise NcclLibraryError(
                f"{self.so_file} is NCCL {version_text(self.version)}: at least {version_text(CONFIG_VERSION)} is "
                "needed, for its configuration of communicators"
            )

    @property
    def is_rccl(self) -> bool:
        """Whether this is AMD's RCCL: it has the same functions, and nothing here was ever run with it."""
        return "rccl" in self.so_file

    def has(self, name: str) -> bool:
        return name in self._functions

    def result(self, name: str, *args: Any) -> int:
        """The bare ncclResult_t of a call, for those where another code than success is an answer."""
        function = self._functions.get(name)
        if function is None:
            raise NcclLibraryError(
                f"{self.so_file}, NCCL {version_text(self.version)}, has no {name}: "
                f"NCCL {FUNCTIONS[name].since} or newer is needed"
            )
        return int(function(*args))

    def call(self, name: str, *args: Any) -> None:
        """Call, and raise NcclCallError unless it succeeded."""
        code = self.result(name, *args)
        if code != SUCCESS:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> NcclCallError:
        """What NCCL says of the code, and of the last thing that went wrong in this process."""
        texts = [self._functions["ncclGetErrorString"](code), self._functions["ncclGetLastError"](None)]
        known = [text.decode("utf-8", "replace").strip() for text in texts if text]
        return NcclCallError(name, code, "; ".join(text for text in known if text) or "unknown error")

    def _version(self) -> int:
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def __repr__(self) -> str:
        name = "RCCL (not tested)" if self.is_rccl else "NCCL"
        return f"<{type(self).__name__} {name} {version_text(self.version)}, {self.so_file}>"


def version_text(version: int) -> str:
    """21805 -> "2.18.5"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _load(so_file: str) -> Mapping[str, Callable[..., Any]]:
    try:
        library = ctypes.CDLL(so_file)
    except OSError as error:
        raise NcclLibraryError(f"{so_file} cannot be loaded as an NCCL library: {error}") from error
    # The loader gives the same handle for the same file, whatever name it goes by.
    functions = _bind(library._handle)
    missing = [name for name, row in FUNCTIONS.items() if name not in functions and not row.since]
    if "ncclGetVersion" in missing:
        raise NcclLibraryError(f"{so_file} is not an NCCL library: it has no ncclGetVersion")
    if missing:
        raise NcclLibraryError(f"{so_file} is an NCCL library that is too old, or not whole: no {', '.join(missing)}")
    return functions


@functools.cache
def _bind(handle: int) -> Mapping[str, Callable[..., Any]]:
    """Every function of the table that the loaded library has, with its types."""
    library = ctypes.CDLL(None, handle=handle)
    functions: dict[str, Callable[..., Any]] = {}
    for name, row in FUNCTIONS.items():
        with contextlib.suppress(AttributeError):  # what that means is the caller's to say
            function = getattr(library, name)
            function.restype, function.argtypes = row.restype, row.argtypes
            functions[name] = function
    return functions
