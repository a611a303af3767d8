"""What every copier does, whichever memory it copies between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

from kvferry.copy.plan import CopyPlan
from kvferry.errors import CopyCancelled

Cancelled: TypeAlias = Callable[[], bool]
Steps: TypeAlias = Generator[int, None, None]


class Copier(ABC):
    """Copies chunks between paged blocks and flat memory. For one thread at a time.

    No exception leaves a copy in flight.
    """

    def gather(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side, and block until the bytes are in place.

        Where `cancelled` is given it is asked before each step: once it says True nothing more is started, what was
        started is waited for, and CopyCancelled is raised. ValueError where the plan skips a part of a chunk.
        """
        self._run(plan, cancelled, to_flat=True)

    def scatter(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side, as `gather` does the other way.

        Of a chunk of which a part is skipped all may be read.
        """
        self._run(plan, cancelled, to_flat=False)

    def steps(self, plan: CopyPlan, *, to_flat: bool) -> Steps:
        """The same copy, for who has other work to do between its steps: before each it gives how
        many bytes, at least, came before it.

        All bytes are in place when it ends. `close()` ends it early, and waits for what was started.
        """
        return self._steps(plan.in_order(whole=to_flat), to_flat=to_flat)

    @abstractmethod
    def warm(self) -> None:
        """Pay now what the first copy would have to pay."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the copier holds; idempotent."""

    @abstractmethod
    def _steps(self, plan: CopyPlan, *, to_flat: bool) -> Steps:
        """`steps` of a plan that is in order."""

    def _run(self, plan: CopyPlan, cancelled: Cancelled | None, *, to_flat: bool) -> None:
        with closing(self.steps(plan, to_flat=to_flat)) as steps:
            for done_bytes in steps:
                if cancelled is not None and cancelled():
                    raise CopyCancelled(f"the copy was cancelled after {done_bytes} bytes")
