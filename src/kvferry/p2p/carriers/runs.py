"""A long list of byte runs in host memory, in order, of which any part can be had as buffers for a system call."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
MAX_BUFFERS = 512  # the system takes at most 1024 at once
# All that a process can address, of which slices are cut: that takes half as long as to make a view for each run.
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")


class ByteRuns:
    """Runs of `lengths` bytes at `addresses`, none of them empty. Whoever made it keeps the memory (`owner`) alive."""

    def __init__(self, addresses: Int64s, lengths: Int64s, owner: object) -> None:
        self._addresses, self._lengths = _merged(addresses, lengths)
        self._ends = np.cumsum(self._lengths)
        self._owner = owner

    @classmethod
    def single(cls, address: int, nbytes: int, owner: object) -> ByteRuns:
        """One run; of no bytes, none."""
        count = 1 if nbytes else 0
        return cls(np.full(count, address, np.int64), np.full(count, nbytes, np.int64), owner)

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return len(self._ends)

    def part(self, begin: int, end: int) -> ByteRuns:
        """Bytes `begin` to `end` of it."""
        starts = self._ends - self._lengths
        from_, to = np.maximum(starts, begin), np.minimum(self._ends, end)
        some = from_ < to
        return ByteRuns((self._addresses + from_ - starts)[some], (to - from_)[some], self._owner)

    def rows_from(self, address: int) -> Int64s:
        """The copy that fills the runs from one stretch of memory, as rows (target, source, bytes)."""
        return np.stack((self._addresses, address + self._ends - self._lengths, self._lengths), axis=1)

    def buffers(self, position: int, nbytes: int) -> list[memoryview]:
        """At most `nbytes` bytes from byte `position` on, in at most `MAX_BUFFERS` buffers."""
        first = int(np.searchsorted(self._ends, position, side="right"))
        last = int(np.searchsorted(self._ends, position + nbytes))
        stop = min(first + MAX_BUFFERS, last + 1, len(self._ends))
        found: list[memoryview] = []
        for address, length, end in zip(
            self._addresses[first:stop].tolist(),
            self._lengths[first:stop].tolist(),
            self._ends[first:stop].tolist(),
            strict=True,
        ):
            if nbytes <= 0:
                break
            start = address + length - (end - position)
            size = min(end - position, nbytes)
            found.append(_MEMORY[start : start + size])
            position += size
            nbytes -= size
        return found


def joined(runs: Sequence[ByteRuns]) -> ByteRuns:
    """All of them, one after the other."""
    if len(runs) == 1:
        return runs[0]
    addresses = np.concatenate([each._addresses for each in runs])
    lengths = np.concatenate([each._lengths for each in runs])
    return ByteRuns(addresses, lengths, [each._owner for each in runs])


def _merged(addresses: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """The same bytes, runs that touch joined."""
    if len(addresses) < 2:
        return addresses, lengths
    heads = np.flatnonzero(np.concatenate(([True], addresses[:-1] + lengths[:-1] != addresses[1:])))
    return addresses[heads], np.add.reduceat(lengths, heads)
