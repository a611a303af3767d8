"""Where the NCCL library is."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kvferry.errors import NcclLibraryError

_VARIABLES = ("KVFERRY_NCCL_SO_PATH", "VLLM_NCCL_SO_PATH")
_WHEELS = "nvidia-nccl-cu12 or nvidia-nccl-cu13"


def find_nccl_library() -> str:
    """The file, or the name for the loader, of the NCCL library to use.

    In this order: KVFERRY_NCCL_SO_PATH; VLLM_NCCL_SO_PATH; the file of the `nvidia-nccl` wheel, which is the one that
    torch uses; `libnccl.so.2`, or `librccl.so.1` where torch is built for ROCm. A variable that is set is taken at its
    word: it is never gone on from to another library.

    Raises:
        NcclLibraryError: none can be loaded; the text lists all that was tried, and why each was not taken.
    """
    return _find(os.environ, rocm=torch.version.hip is not None)


def _find(environment: Mapping[str, str], *, rocm: bool) -> str:
    for variable in _VARIABLES:
        if environment.get(variable):
            path = environment[variable]
            refusal = _why_not(path)
            if refusal:
                raise NcclLibraryError(f"{variable} is set to {path}, which cannot be loaded: {refusal}")
            return path
    tried = [f"{variable} (not set)" for variable in _VARIABLES]
    for candidate in _candidates(rocm=rocm):
        refusal = _why_not(candidate)
        if not refusal:
            return candidate
        tried.append(f"{candidate} ({refusal})")
    if not rocm and not any(True for _ in _wheel_files()):
        tried.insert(len(_VARIABLES), f"the wheel {_WHEELS} (not installed)")
    raise NcclLibraryError(
        f"no NCCL library can be loaded. Tried: {'; '.join(tried)}. Install the wheel that fits torch's CUDA "
        f"({_WHEELS}), or set {_VARIABLES[0]} to the library's path"
    )


def _candidates(*, rocm: bool) -> Iterator[str]:
    if rocm:
        yield "librccl.so.1"
        return
    yield from _wheel_files()
    yield "libnccl.so.2"


def _wheel_files() -> Iterator[str]:
    """Files of the wheel, wherever its release puts them: nvidia/nccl/lib so far, nvidia/cu13/lib as its neighbours."""
    spec = importlib.util.find_spec("nvidia")
    for home in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from (str(path) for path in sorted(Path(home).glob("*/lib/libnccl.so.2"), reverse=True))


def _why_not(path: str) -> str:
    """The loader's reason for not loading it, or nothing."""
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return ""
