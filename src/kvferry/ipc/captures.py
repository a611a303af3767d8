"""Work beside an engine that may be capturing CUDA graphs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from kvferry.cuda import stream


def beside_captures(device: int | None) -> AbstractContextManager[None]:
    """See `kvferry.cuda.stream.beside_captures`; nothing for the host (None)."""
    return contextlib.nullcontext() if device is None else stream.beside_captures(device)
