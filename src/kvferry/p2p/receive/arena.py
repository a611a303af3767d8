"""Which parts of a fixed stretch of memory are free. Bookkeeping only: offsets, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGNMENT = 256


class Arena:
    """Hands out ranges of `nbytes` bytes; ranges that touch are joined when they come back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []  # start, end; in order
        self._used: dict[int, int] = {}
        self.free_bytes = self.nbytes

    def reserve(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Offsets of ranges of those sizes: all of them, or None."""
        wanted = [padded(size) for size in sizes]
        if sum(wanted) > self.free_bytes:
            return None
        taken: list[int] = []
        for size in wanted:
            offset = self._take(size)
            if offset is None:
                self.release(taken)
                return None
            taken.append(offset)
        return tuple(taken)

    def release(self, offsets: Sequence[int]) -> None:
        """Take ranges back."""
        for offset in offsets:
            size = self._used.pop(offset)
            self.free_bytes += size
            start, end = offset, offset + size
            at = bisect_left(self._free, (start, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == start:
                start = self._free.pop(at - 1)[0]
            insort(self._free, (start, end))

    def could_ever(self, sizes: Sequence[int]) -> bool:
        """Whether `reserve` would give them if all were free."""
        return sum(padded(size) for size in sizes) <= self.nbytes

    def _take(self, size: int) -> int | None:
        """The smallest free range that is large enough, from its start."""
        fitting = [(end - start, start) for start, end in self._free if end - start >= size]
        if not fitting:
            return None
        space, start = min(fitting)
        self._free.remove((start, start + space))
        if space > size:
            insort(self._free, (start + size, start + space))
        self._used[start] = size
        self.free_bytes -= size
        return start


def padded(size: int) -> int:
    """What a range of `size` bytes takes; at least one unit, so that each has a place of its own."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
