"""The watchdog: whether every thread of the server still moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvferry.server.watch.pulse import Watched

_LOG = logging.getLogger(__name__)

_LOOK_S = 0.5


class Report(NamedTuple):
    """What the last look found; there are `reasons` where it is not `healthy`, and `warnings` beside that."""

    healthy: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class Health:
    """Looks at pulses. Belongs to the loop thread, whose own pulse others look at.

    A thread that stalled and moves again is healthy again; what has failed for good stays so.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._sources: list[Callable[[], Iterable[Watched]]] = []
        self._mild: list[Callable[[], Iterable[Watched]]] = []
        self._notes: list[Callable[[], Iterable[str]]] = []
        self._failure: str | None = None
        self._look_at = 0.0
        self.report = Report(True, ())

    def watch(self, pulses: Callable[[], Iterable[Watched]], *, mild: bool = False) -> None:
        """Look at these, too; `pulses` is asked at every look, since threads come and go.

        If they are `mild`, the server does without them: they are told as warnings.
        """
        (self._mild if mild else self._sources).append(pulses)

    def note(self, texts: Callable[[], Iterable[str]]) -> None:
        """Tell these as warnings, too; `texts` is asked at every look."""
        self._notes.append(texts)

    def fail(self, text: str) -> None:
        """Something has failed for good, and the server is about to end."""
        self._failure = text
        self._look_at = 0.0

    def tick(self, now: float) -> None:
        """Look, if it is time to. What changed is logged."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        reasons = (*(() if self._failure is None else (self._failure,)), *self._stalls(self._sources, now))
        warnings = (*self._stalls(self._mild, now), *(text for texts in self._notes for text in texts()))
        was_healthy, self.report = self.report.healthy, Report(not reasons, reasons, warnings)
        if reasons and was_healthy:
            _LOG.error("unhealthy: %s", "; ".join(reasons), extra={"reasons": reasons})
        elif not reasons and not was_healthy:
            _LOG.warning("healthy again")

    def _stalls(self, sources: Iterable[Callable[[], Iterable[Watched]]], now: float) -> tuple[str, ...]:
        texts = (pulse.stalled(now, self._stall_s) for pulses in sources for pulse in pulses())
        return tuple(text for text in texts if text is not None)

    def values(self) -> dict[str, float]:
        """For `stats`."""
        return {"healthy": float(self.report.healthy)}
