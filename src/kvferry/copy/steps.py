"""How one copy is cut into steps that fit a staging buffer. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvferry.copy.plan import CopyPlan

ALIGNMENT = 16  # of the places where a copy is cut, so that the kernel finds whole vectors on both sides
_SMALL_BYTES = 4 << 20  # the copy engine takes longer for them than the host to submit the next step


class Step(NamedTuple):
    """Bytes `begin` to `end` of a copy, where byte 0 is the first of its first chunk, and chunk follows chunk.

    `ranges` say where they lie: flat address, distance from `begin`, number of bytes.
    """

    begin: int
    end: int
    ranges: list[tuple[int, int, int]]


def cut_steps(plan: CopyPlan, *, buffer_bytes: int, growing: bool) -> Iterator[Step]:
    """The steps of a plan whose chunks are in order. Chunks that touch are one range.

    Steps begin small and grow, or (not `growing`) shrink towards the end: nothing overlaps with the kernel of a
    gather's first step, or of a scatter's last.
    """
    assert buffer_bytes % ALIGNMENT == 0
    chunk_bytes, flats = plan.chunks.chunk_bytes, plan.flats
    total = len(flats) * chunk_bytes
    heads = [0, *(np.flatnonzero(flats[1:] - flats[:-1] != chunk_bytes) + 1).tolist()]
    runs = [head * chunk_bytes for head in heads] + [total]
    addresses = [int(flats[head]) for head in heads] if total else []
    begin = 0
    while begin < total:
        wanted = begin + _SMALL_BYTES if growing else (total - begin) // 2 // ALIGNMENT * ALIGNMENT
        end = min(begin + min(max(wanted, _SMALL_BYTES), buffer_bytes), total)
        ranges = []
        at = begin
        while at < end:
            run = bisect_right(runs, at) - 1
            stop = min(runs[run + 1], end)
            ranges.append((addresses[run] + at - runs[run], at - begin, stop - at))
            at = stop
        yield Step(begin, end, ranges)
        begin = end
