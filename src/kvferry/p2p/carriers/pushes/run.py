"""What both sides agree on at once: consecutive items of one transfer, in parts of a slot each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvferry.copy.plan import ChunkMap, CopyPlan
from kvferry.p2p.carriers.runs import ByteRuns, joined
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import BlockMemory, Memory


@dataclass(eq=False)
class Run:
    """Items from `item` on, of `sizes` bytes, one after the other; `memory` is None where they are to be dropped.

    `pieces` has those of each. Of a layer's blocks, all of the first piece come first. `wanted` is for the lane's
    thread, once the run has been given to it.
    """

    number: int
    item: int
    memory: Memory | None
    pieces: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]
    part_bytes: int = 0  # what both sides have agreed on
    wanted: bool = True

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each item ends."""
        return tuple(accumulate(self.sizes))

    @property
    def nbytes(self) -> int:
        return self.ends[-1]

    def items_ending(self, begin: int, end: int) -> list[int]:
        """The items whose last byte is one of `begin` to `end`."""
        return [self.item + place for place, at in enumerate(self.ends) if begin < at <= end]

    @cached_property
    def plan(self) -> CopyPlan:
        """The copy of its blocks from or to one flat chunk, with the pieces of all items as its planes."""
        memory = self.memory
        assert isinstance(memory, BlockMemory)
        caches, blocks = memory.caches, len(memory.ids)
        planes = np.concatenate([caches.places(self.item + at, each) for at, each in enumerate(self.pieces)], axis=1)
        chunks = ChunkMap.of_planes(planes, num_blocks=caches.num_blocks, blocks=blocks)
        return chunks.plan(memory.ids, np.zeros(1, dtype=np.int64))

    @cached_property
    def byte_runs(self) -> ByteRuns:
        """Where its bytes lie, in host memory."""
        memory = self.memory
        assert memory is not None
        return joined([memory.runs(self.item + place, pieces) for place, pieces in enumerate(self.pieces)])


class Part(NamedTuple):
    """Bytes `begin` to `end` of a run."""

    run: Run
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def is_last(self) -> bool:
        """Whether the run ends with it."""
        return self.end == self.run.nbytes

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Of flat memory: (address, distance from `begin`, bytes) of what lies in each item."""
        run, start = self.run, 0
        for place, end in enumerate(run.ends):
            first, last = max(start, self.begin), min(end, self.end)
            if first < last:
                address = run.memory.items[run.item + place][0]  # type: ignore[union-attr]
                yield address + first - start, first - self.begin, last - first
            start = end
