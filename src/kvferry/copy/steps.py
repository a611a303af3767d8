"""How one copy is cut into steps that fit a staging buffer. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvferry.copy.plan import Int64s, Runs, split_runs

PIECE_BYTES = 32 << 10
_FIRST_STEP_BYTES = 4 << 20


class Step(NamedTuple):
    """One staging buffer's worth of a copy.

    `pieces` are runs of at most `PIECE_BYTES`; piece `i` lies at byte `staged[i]` of the buffer. `ranges` are the same
    bytes as (flat address, byte of the buffer, number of bytes), each within one chunk.
    """

    pieces: Runs
    staged: Int64s
    ranges: list[tuple[int, int, int]]


def cut_steps(batches: Iterable[Runs], *, buffer_bytes: int, max_pieces: int, growing: bool) -> Iterator[Step]:
    """The steps of the runs, in order; a batch is asked for when, or just before, its first step is.

    Steps begin small and grow, or (not `growing`) shrink towards the end: nothing overlaps with the kernel of a
    gather's first step, or of a scatter's last.
    """
    # Cutting long runs into pieces adds at most one piece for every PIECE_BYTES.
    max_runs = max_pieces - -(-buffer_bytes // PIECE_BYTES)
    assert max_runs > 0, "the table of pieces is too small for the buffer"
    copied = 0
    for runs, last in ((runs, False) for runs in batches) if growing else _marked(batches):
        ends = np.cumsum(runs.nbytes)
        starts = ends - runs.nbytes
        total = int(ends[-1]) if len(ends) else 0
        done = 0
        while done < total:
            wanted = copied if growing else (total - done) // 2 // PIECE_BYTES * PIECE_BYTES if last else buffer_bytes
            stop = done + min(buffer_bytes, max(_FIRST_STEP_BYTES, wanted), total - done)
            start_run = int(np.searchsorted(ends, done, side="right"))
            stop_run = int(np.searchsorted(starts, stop, side="left"))
            if stop_run - start_run > max_runs:
                stop_run = start_run + max_runs
                stop = int(ends[stop_run - 1])
            part = Runs(*(column[start_run:stop_run] for column in runs))
            yield _step(part, done - int(starts[start_run]), stop - done)
            copied += stop - done
            done = stop


def _marked(batches: Iterable[Runs]) -> Iterator[tuple[Runs, bool]]:
    """Each batch, and whether it is the last."""
    held: Runs | None = None
    for runs in batches:
        if held is not None:
            yield held, False
        held = runs
    if held is not None:
        yield held, True


def _step(runs: Runs, skipped: int, nbytes: int) -> Step:
    """The step of the `nbytes` that follow the first `skipped` bytes of `runs`."""
    sizes = runs.nbytes.copy()
    paged, flat = runs.paged.copy(), runs.flat.copy()
    paged[0] += skipped
    flat[0] += skipped
    sizes[0] -= skipped
    sizes[-1] -= int(sizes.sum()) - nbytes
    pieces = split_runs(Runs(paged, flat, sizes, runs.chunk), PIECE_BYTES)
    staged = np.cumsum(pieces.nbytes) - pieces.nbytes
    joined = (flat[1:] == flat[:-1] + sizes[:-1]) & (runs.chunk[1:] == runs.chunk[:-1])
    if joined.all():
        return Step(pieces, staged, [(int(flat[0]), 0, nbytes)])
    heads = np.append(True, ~joined)
    bytes_before = (np.cumsum(sizes) - sizes)[heads]
    lengths = np.append(bytes_before[1:], nbytes) - bytes_before
    ranges = list(zip(flat[heads].tolist(), bytes_before.tolist(), lengths.tolist(), strict=True))
    return Step(pieces, staged, ranges)
