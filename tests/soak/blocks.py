"""The blocks of one thread: spare ones, those in which nothing may land any more, and those that no job ever names."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from soak.board import Journal, Row
from soak.content import PagedBytes

LEFT_ALONE_S = 1.0
NUM_GUARDS = 2
GUARD_BYTE = 0xEE


@dataclass(frozen=True, slots=True)
class _Watched:
    blocks: list[int]
    value: int
    until: float
    why: str


class Blocks:
    """Hands blocks out in random order. A violation is written down with the block's number."""

    def __init__(
        self, memory: PagedBytes, blocks: Sequence[int], *, row: Row, journal: Journal, dice: random.Random
    ) -> None:
        self._memory, self._row, self._journal, self._dice = memory, row, journal, dice
        self._guards, self._spare = list(blocks[:NUM_GUARDS]), list(blocks[NUM_GUARDS:])
        self._watched: deque[_Watched] = deque()
        memory.mark(self._guards, GUARD_BYTE)

    def take(self, count: int) -> list[int]:
        """`count` blocks, all of whose bytes are one random value."""
        while len(self._spare) < count:
            self._end_watch()
        self._dice.shuffle(self._spare)
        taken, self._spare = self._spare[:count], self._spare[count:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        self._spare.extend(blocks)

    def use_elsewhere(self, blocks: list[int], why: str) -> None:
        """Overwrite blocks that a failed job has given up: for a second nobody else may write there."""
        value = self.poison(blocks)
        self._watched.append(_Watched(blocks, value, time.monotonic() + LEFT_ALONE_S, why))

    def poison(self, blocks: Sequence[int]) -> int:
        """Fill blocks with a random byte, which is returned."""
        value = self._dice.randrange(1, GUARD_BYTE)
        self._memory.mark(blocks, value)
        return value

    def expect_untouched(self, blocks: Sequence[int], value: int, what: str) -> None:
        for block in self._memory.unmarked(blocks, value):
            row = self._memory.read([block])[0, 0]
            self._journal.violation(what, block=block, expected_byte=value, row=row[:32].tobytes().hex())

    def check(self, *, all_of_them: bool = False) -> None:
        """Look at the guards, and at what has been watched for long enough."""
        self.expect_untouched(self._guards, GUARD_BYTE, "a block that no job has ever named was written to")
        while self._watched and (all_of_them or self._watched[0].until <= time.monotonic()):
            self._end_watch()

    def _end_watch(self) -> None:
        watched = self._watched.popleft()
        what = f"bytes landed in a block after its job had ended: {watched.why}"
        self.expect_untouched(watched.blocks, watched.value, what)
        self._row.add("blocks_left_alone", len(watched.blocks))
        self._spare.extend(watched.blocks)
