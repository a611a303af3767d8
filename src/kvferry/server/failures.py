"""Errors as codes that travel: the code is stable, the text is for people."""

from __future__ import annotations

from kvferry.errors import (
    BlockIdError,
    ChunkCorruptError,
    CopyCancelled,
    CudaError,
    DeadlineError,
    LayoutError,
    RequestError,
    ShareError,
    StaleHandleError,
    UnknownDeviceError,
    WireError,
)
from kvferry.server.work.tasks import Failure

# The first that fits counts, so a class comes before its base.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (BlockIdError, "block_ids"),
    (ChunkCorruptError, "integrity"),
    (LayoutError, "layout"),
    (WireError, "wire"),
    (UnknownDeviceError, "device"),
    (StaleHandleError, "stale"),
    (ShareError, "share"),
    (CopyCancelled, "cancelled"),
    (DeadlineError, "deadline"),
    (CudaError, "cuda"),
    (MemoryError, "memory"),
    (ValueError, "value"),
)


def failure_of(error: Exception) -> Failure:
    """What to tell a client about an error."""
    if isinstance(error, RequestError):
        return Failure(error.code, str(error).removesuffix(f" [{error.code}]"))
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
    return Failure(code, str(error) or type(error).__name__)
