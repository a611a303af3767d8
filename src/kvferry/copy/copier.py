"""What every copier does, whichever memory it copies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvferry.copy.plan import CopyPlan
from kvferry.errors import CopyCancelled

Cancelled: TypeAlias = Callable[[], bool]


class Copier(Protocol):
    """Copies chunks between paged blocks and flat memory; blocks until the bytes are in place. One thread at a time.

    Where `cancelled` is given it is asked between steps: once it says True nothing more is started, what was started is
    waited for, and CopyCancelled is raised. No exception leaves a copy in flight.
    """

    def gather(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side; ValueError where the plan skips a part of a chunk."""

    def scatter(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""

    def warm(self) -> None:
        """Pay now what the first copy would have to pay."""

    def close(self) -> None:
        """Give back what the copier holds; idempotent."""


def check_cancelled(cancelled: Cancelled | None, done_bytes: int) -> None:
    """Raise CopyCancelled where `cancelled` says so."""
    if cancelled is not None and cancelled():
        raise CopyCancelled(f"the copy was cancelled after {done_bytes} bytes")
