"""Copies within host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np

from kvferry.copy.copier import Cancelled, Work, batches_of, check_cancelled
from kvferry.copy.plan import Int64s, Runs, split_runs
from kvferry.copy.streaming import StreamingCopy

_STEP_BYTES = 16 << 20


class HostCopier:
    """Copies between host addresses, past the caches where the processor allows; other Python threads run meanwhile."""

    def __init__(self) -> None:
        self._streaming = StreamingCopy.load()

    def gather(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side."""
        self._copy((np.stack((part.flat, part.paged, part.nbytes), axis=1) for part in _parts(runs)), cancelled)

    def scatter(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""
        self._copy((np.stack((part.paged, part.flat, part.nbytes), axis=1) for part in _parts(runs)), cancelled)

    def warm(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing that outlives the object."""

    def _copy(self, batches: Iterable[Int64s], cancelled: Cancelled | None) -> None:
        """Copy rows (target, source, bytes) in steps of about `_STEP_BYTES`, asking before each."""
        done = 0
        for rows in batches:
            ends = done + np.cumsum(rows[:, 2])
            start = 0
            while start < len(rows):
                check_cancelled(cancelled, done)
                stop = max(start + 1, int(np.searchsorted(ends, done + _STEP_BYTES, side="right")))
                if self._streaming is not None:
                    self._streaming.copy_rows(rows[start:stop])
                else:
                    _move(rows[start:stop])
                start, done = stop, int(ends[stop - 1])


def _parts(work: Work) -> Iterator[Runs]:
    return (split_runs(runs, _STEP_BYTES) for runs in batches_of(work))


def _move(rows: Int64s) -> None:
    for target, source, nbytes in rows.tolist():
        ctypes.memmove(target, source, nbytes)
