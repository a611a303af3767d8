"""Calls under way, counted, so that what they use is not given back under them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvferry.errors import DeadlineError

if TYPE_CHECKING:
    from types import TracebackType


class Gate:
    """`with gate:` around each call; `last_one_out` before what the calls use is destroyed.

    Who closes first makes new calls fail by themselves, then waits here for those inside. Any number may be inside.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._was_last_out = False

    def __enter__(self) -> None:
        with self._changed:
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def last_one_out(self, timeout_s: float) -> bool:
        """Block until no call is inside; True for exactly one caller, who destroys what the calls used.

        Raises
        ------
        DeadlineError
            Some still were, after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._inside:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(f"{self._inside} calls of other threads did not end within {timeout_s} s")
                self._changed.wait(remaining)
            first, self._was_last_out = not self._was_last_out, True
        return first
