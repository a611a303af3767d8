"""How one copy is cut into steps that fit a staging buffer. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvferry.copy.plan import Int64s, Runs, split_runs

PIECE_BYTES = 16 << 10
_FIRST_STEP_BYTES = 2 << 20


class Step(NamedTuple):
    """One staging buffer's worth of a copy.

    `pieces` are runs of at most `PIECE_BYTES`; piece `i` lies at byte `staged[i]` of the buffer. `ranges` are the same
    bytes as (flat address, byte of the buffer, number of bytes), each as long as the flat side goes on without a gap.
    """

    pieces: Runs
    staged: Int64s
    ranges: list[tuple[int, int, int]]


def cut_steps(runs: Runs, *, buffer_bytes: int, max_pieces: int, growing: bool) -> Iterator[Step]:
    """The steps of `runs`, in order.

    Steps begin small and grow, or (not `growing`) shrink towards the end: nothing overlaps with the kernel of a
    gather's first step, or of a scatter's last.
    """
    ends = np.cumsum(runs.nbytes)
    starts = ends - runs.nbytes
    total = int(ends[-1]) if len(ends) else 0
    # Cutting long runs into pieces adds at most one piece for every PIECE_BYTES.
    max_runs = max_pieces - -(-buffer_bytes // PIECE_BYTES)
    assert max_runs > 0, "the table of pieces is too small for the buffer"
    done = 0
    while done < total:
        wanted = done if growing else (total - done) // 2 // PIECE_BYTES * PIECE_BYTES
        stop = done + min(buffer_bytes, max(_FIRST_STEP_BYTES, wanted), total - done)
        first = int(np.searchsorted(ends, done, side="right"))
        last = int(np.searchsorted(starts, stop, side="left"))
        if last - first > max_runs:
            last = first + max_runs
            stop = int(ends[last - 1])
        yield _step(Runs(*(column[first:last] for column in runs)), done - int(starts[first]), stop - done)
        done = stop


def _step(runs: Runs, skipped: int, nbytes: int) -> Step:
    """The step of the `nbytes` that follow the first `skipped` bytes of `runs`."""
    sizes = runs.nbytes.copy()
    paged, flat = runs.paged.copy(), runs.flat.copy()
    paged[0] += skipped
    flat[0] += skipped
    sizes[0] -= skipped
    sizes[-1] -= int(sizes.sum()) - nbytes
    pieces = split_runs(Runs(paged, flat, sizes), PIECE_BYTES)
    staged = np.cumsum(pieces.nbytes) - pieces.nbytes
    gaps = np.flatnonzero(flat[1:] != flat[:-1] + sizes[:-1]) + 1
    heads = np.concatenate(([0], gaps))
    bytes_before = (np.cumsum(sizes) - sizes)[heads]
    lengths = np.diff(np.append(bytes_before, nbytes))
    ranges = list(zip(flat[heads].tolist(), bytes_before.tolist(), lengths.tolist(), strict=True))
    return Step(pieces, staged, ranges)
