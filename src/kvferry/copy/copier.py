"""What every copier does, whichever memory it copies between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from kvferry.copy.plan import Runs
from kvferry.errors import CopyCancelled

Cancelled: TypeAlias = Callable[[], bool]
Work: TypeAlias = Runs | Iterable[Runs]


class Copier(Protocol):
    """Copies runs between paged blocks and flat chunks; blocks until the bytes are in place. One thread at a time.

    Runs come all at once (`plan_runs`) or in batches (`plan_batches`), which are taken as the copy goes on.

    Where `cancelled` is given it is asked between steps: once it says True nothing more is started, what was started is
    waited for, and CopyCancelled is raised. No exception leaves a copy in flight.
    """

    def gather(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side."""

    def scatter(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""

    def warm(self) -> None:
        """Pay now what the first copy would have to pay."""

    def close(self) -> None:
        """Give back what the copier holds; idempotent."""


def batches_of(work: Work) -> Iterable[Runs]:
    """The batches of runs, one where they came all at once."""
    return (work,) if isinstance(work, Runs) else work


def check_cancelled(cancelled: Cancelled | None, done_bytes: int) -> None:
    """Raise CopyCancelled where `cancelled` says so."""
    if cancelled is not None and cancelled():
        raise CopyCancelled(f"the copy was cancelled after {done_bytes} bytes")
