"""How runs of bytes are cut for the warps of a kernel. Pure arithmetic."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

STRIP_BYTES = 16 << 10  # what one warp copies at a time


def cut_strips(lengths: Int64s, strip_bytes: int = STRIP_BYTES) -> tuple[Int64s, Int64s, Int64s]:
    """Runs of bytes in strips of at most `strip_bytes`: of each its run, its place in that, and its bytes."""
    counts = -(-lengths // strip_bytes)
    run = np.repeat(np.arange(len(counts)), counts)
    within = (np.arange(len(run)) - (np.cumsum(counts) - counts)[run]) * strip_bytes
    return run, within, np.minimum(lengths[run] - within, strip_bytes)
