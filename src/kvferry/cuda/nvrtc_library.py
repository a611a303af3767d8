"""libnvrtc by ctypes: where it lies, and one call that compiles."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from kvferry.errors import CudaError, CudaUnavailableError


def compile_source(source: str, architecture: str) -> bytes:
    """PTX for `architecture` ("compute_90") of CUDA C++ `source`.

    Raises:
        CudaError: the source does not compile; the text holds the compiler's log.
        CudaUnavailableError: there is no libnvrtc.
    """
    library = _library()
    program = c_void_p()
    _check(library, "nvrtcCreateProgram", byref(program), source.encode(), b"kvferry.cu", 0, None, None)
    try:
        options = (c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        code = library.nvrtcCompileProgram(program, 2, options)
        if code != 0:
            raise CudaError("nvrtcCompileProgram", code, _text(library, "nvrtcGetProgramLog", program).decode())
        return _text(library, "nvrtcGetPTX", program)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(library: ctypes.CDLL, getter: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _check(library, f"{getter}Size", program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    _check(library, getter, program, text)
    return text.value


def _check(library: ctypes.CDLL, name: str, *args: object) -> None:
    code = getattr(library, name)(*args)
    if code != 0:
        raise CudaError(name, code, (library.nvrtcGetErrorString(code) or b"unknown error").decode())


@functools.cache
def _library() -> ctypes.CDLL:
    tried = []
    for candidate in _candidates():
        tried.append(candidate)
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(candidate)
            library.nvrtcGetErrorString.argtypes = (c_int,)
            library.nvrtcGetErrorString.restype = c_char_p
            return library
    raise CudaUnavailableError(
        f"no libnvrtc to compile kernels with (tried {', '.join(tried)}): pip install nvidia-cuda-nvrtc"
    )


def _candidates() -> Iterator[str]:
    """Files of the wheels that torch was installed with, its own CUDA version first; then names for the loader."""
    major = (torch.version.cuda or "13").split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(home) for home in (spec.submodule_search_locations or ())] if spec is not None else []
    for pattern in (f"*/lib/libnvrtc.so.{major}", "*/lib/libnvrtc.so.*"):
        for home in homes:
            yield from (str(path) for path in sorted(home.glob(pattern), reverse=True))
    yield from (f"libnvrtc.so.{major}", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
