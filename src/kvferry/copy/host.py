"""Copies within host memory."""

from __future__ import annotations

import ctypes

from kvferry.copy.copier import Cancelled, check_cancelled
from kvferry.copy.plan import Int64s, Runs

_STEP_BYTES = 8 << 20


class HostCopier:
    """Copies between host addresses with `memmove`; other Python threads run meanwhile."""

    def gather(self, runs: Runs, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side."""
        _copy(runs.flat, runs.paged, runs.nbytes, cancelled)

    def scatter(self, runs: Runs, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""
        _copy(runs.paged, runs.flat, runs.nbytes, cancelled)

    def warm(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to give back."""


def _copy(targets: Int64s, sources: Int64s, sizes: Int64s, cancelled: Cancelled | None) -> None:
    move = ctypes.memmove
    done = asked = 0
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        move(target, source, nbytes)
        done += nbytes
        if done - asked >= _STEP_BYTES:
            check_cancelled(cancelled, done)
            asked = done
