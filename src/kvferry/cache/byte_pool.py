"""A pool that only counts: for a tier where the bytes find their places themselves, as files do."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class BytePool:
    """Hands out numbers, never the same twice, while all that is in use has at most `capacity_bytes`.

    The capacity may be set at any time, also below what is in use; that then has to be freed by its owner.

    Parameters
    ----------
    on_free
        Called with each number that is given back.
    """

    def __init__(self, capacity_bytes: int, on_free: Callable[[int], None] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._on_free = on_free
        self._sizes: dict[int, int] = {}
        self._ids = itertools.count()

    def __repr__(self) -> str:
        return f"<BytePool {self.used_bytes} of {self.capacity_bytes} bytes in {len(self._sizes)} chunks>"

    def fits(self, nbytes: int) -> bool:
        """Whether an empty pool could hold `nbytes`."""
        return nbytes <= self.capacity_bytes

    def kind(self, nbytes: int) -> int:
        """All places are of one kind."""
        del nbytes
        return 0

    def runs(self, nbytes: int, limit: int) -> tuple[list[int], ...]:
        """None: every place makes room."""
        del nbytes, limit
        return ()

    def allocate(self, nbytes: int) -> int | None:
        """A number for `nbytes`, or None where there is no room."""
        if nbytes <= 0:
            raise ValueError(f"a chunk of {nbytes} bytes; a chunk holds at least one")
        if self.used_bytes + nbytes > self.capacity_bytes:
            return None
        number = next(self._ids)
        self._sizes[number] = nbytes
        self.used_bytes += nbytes
        return number

    def free(self, offset: int) -> None:
        """Give a number back. Freeing what is not in use is a fault of ours."""
        self.used_bytes -= self._sizes.pop(offset)
        if self._on_free is not None:
            self._on_free(offset)
