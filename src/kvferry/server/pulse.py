"""What a thread is doing and since when, for the watchdog that asks whether it still moves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Pulse:
    """One thread's sign of life. The thread itself calls `beat` and `step`, any thread calls `stalled`.

    A thread that beats at least once a second, also when it is idle, and still is called stalled, hangs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._now: tuple[str, float] = ("its start", time.monotonic())  # replaced as a whole, so never seen half

    def __repr__(self) -> str:
        what, since = self._now
        return f"<Pulse of {self.name}: in {what} for {time.monotonic() - since:.1f} s>"

    def beat(self) -> None:
        """The thread has come round its loop once more."""
        self._now = ("its loop", time.monotonic())

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Name what the body does, which may hang. Steps may lie in one another: the innermost one is told."""
        outer, _ = self._now
        self._now = (what, time.monotonic())
        try:
            yield
        finally:
            self._now = (outer, time.monotonic())

    def stalled(self, now: float, limit_s: float) -> str | None:
        """Who hangs, in what, for how long; None where the last sign of life is at most `limit_s` before `now`."""
        what, since = self._now
        if now - since <= limit_s:
            return None
        return f"{self.name} has been in {what} for {now - since:.1f} s"
