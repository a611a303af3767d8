"""Copies within host memory."""

from __future__ import annotations

import ctypes

import numpy as np

from kvferry.copy.copier import Cancelled, check_cancelled
from kvferry.copy.plan import Int64s, Runs, split_runs
from kvferry.copy.streaming import StreamingCopy

_STEP_BYTES = 16 << 20


class HostCopier:
    """Copies between host addresses, past the caches where the processor allows; other Python threads run meanwhile."""

    def __init__(self) -> None:
        self._streaming = StreamingCopy.load()

    def gather(self, runs: Runs, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side."""
        split = split_runs(runs, _STEP_BYTES)
        self._copy(np.stack((split.flat, split.paged, split.nbytes), axis=1), cancelled)

    def scatter(self, runs: Runs, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""
        split = split_runs(runs, _STEP_BYTES)
        self._copy(np.stack((split.paged, split.flat, split.nbytes), axis=1), cancelled)

    def warm(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing that outlives the object."""

    def _copy(self, rows: Int64s, cancelled: Cancelled | None) -> None:
        """Copy `rows` (target, source, bytes) in steps of about `_STEP_BYTES`, asking before each."""
        ends = np.cumsum(rows[:, 2])
        start = done = 0
        while start < len(rows):
            check_cancelled(cancelled, done)
            stop = max(start + 1, int(np.searchsorted(ends, done + _STEP_BYTES, side="right")))
            if self._streaming is not None:
                self._streaming.copy_rows(rows[start:stop])
            else:
                _move(rows[start:stop])
            start, done = stop, int(ends[stop - 1])


def _move(rows: Int64s) -> None:
    for target, source, nbytes in rows.tolist():
        ctypes.memmove(target, source, nbytes)
