"""What a thread is doing and since when, for the watchdog that asks whether it still moves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol


class Watched(Protocol):
    """What the watchdog looks at."""

    def stalled(self, now: float, limit_s: float) -> str | None:
        """Who hangs, in what, for how long; None where it moved in the last `limit_s` before `now`."""


class Pulse:
    """One thread's sign of life. The thread itself calls `beat` and `step`, any thread calls `stalled`.

    A thread that beats at least once a second, also when it is idle, and still is called stalled, hangs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # What, since when, and its own limit: replaced as a whole, so never seen half.
        self._now: tuple[str, float, float] = ("its start", time.monotonic(), 0.0)

    def __repr__(self) -> str:
        what, since, _ = self._now
        return f"<Pulse of {self.name}: in {what} for {time.monotonic() - since:.1f} s>"

    def beat(self) -> None:
        """The thread has come round its loop once more."""
        self._now = ("its loop", time.monotonic(), 0.0)

    def go_on(self) -> None:
        """What the thread is in has come a bit further."""
        what, _, limit_s = self._now
        self._now = (what, time.monotonic(), limit_s)

    @contextlib.contextmanager
    def step(self, what: str, limit_s: float = 0.0) -> Iterator[None]:
        """Name what the body does, which may hang. Steps may lie in one another: the innermost one is told.

        With `limit_s` it may take that long, where that is longer than others may.
        """
        outer, _, outer_limit_s = self._now
        self._now = (what, time.monotonic(), limit_s)
        try:
            yield
        finally:
            self._now = (outer, time.monotonic(), outer_limit_s)

    def stalled(self, now: float, limit_s: float) -> str | None:
        """Who hangs, in what, for how long; None where the last sign of life is at most `limit_s` before `now`."""
        what, since, own_limit_s = self._now
        if now - since <= max(limit_s, own_limit_s):
            return None
        return f"{self.name} has been in {what} for {now - since:.1f} s"
