"""The server's values and health, for threads other than the loop's."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import Metric

from kvferry.errors import ServerGoneError
from kvferry.server.watch.health import Report
from kvferry.server.watch.pulse import Pulse

_ANSWER_S = 1.0


class Snapshot(NamedTuple):
    """All values by name, as in `stats`, what the watchdog says, and metrics beyond that.

    Without an answer of the loop there are none of either.
    """

    values: Mapping[str, float]
    report: Report
    more: tuple[Metric, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """Posted to the loop, which sets the answer."""

    answer: concurrent.futures.Future[Snapshot] = field(default_factory=concurrent.futures.Future)


class Snapshots:
    """Asks the loop; any thread may call.

    Parameters
    ----------
    post
        Hands a question to the loop.
    pulse
        The loop's own, which tells what it does where it does not answer.
    """

    def __init__(self, post: Callable[[Question], None], pulse: Pulse) -> None:
        self._post = post
        self._pulse = pulse
        self._lock = threading.Lock()  # guards the question; not held while its answer is awaited
        self._question: Question | None = None

    def take(self) -> Snapshot:
        """A snapshot; an unhealthy one where the server has stopped, or its loop does not answer within a second."""
        try:
            return self._ask().answer.result(_ANSWER_S)
        except ServerGoneError as error:
            return Snapshot({}, Report(False, (str(error),)))
        except concurrent.futures.TimeoutError:
            stalled = self._pulse.stalled(time.monotonic(), 0.0)
            return Snapshot({}, Report(False, (f"the loop does not answer within {_ANSWER_S:g} s: {stalled}",)))

    def _ask(self) -> Question:
        """The question that is open, so that a loop that hangs collects no more than one."""
        with self._lock:
            if self._question is None or self._question.answer.done():
                question = Question()
                self._post(question)
                self._question = question
            return self._question
