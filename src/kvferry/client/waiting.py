"""Who waits for which answer of the server."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvferry.errors import KVFerryError
from kvferry.protocol.messages import Progress, Reply

Answer = Reply | KVFerryError
OnAnswer = Callable[[Answer], None]
OnLost = Callable[[], None]
OnProgress = Callable[[int], None]
_LOG = logging.getLogger(__name__)


class _Job(NamedTuple):
    on_answer: OnAnswer
    on_lost: OnLost
    on_progress: OnProgress


class Waiting:
    """Talks, which get any number of replies until they are dropped, and jobs, which one reply ends. Thread-safe.

    The server reads or writes our memory for a job, so that its end is not known when the connection ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while an answer is given
        self._talks: dict[int, OnAnswer] = {}
        self._jobs: dict[int, _Job] = {}
        self._ended: Callable[[], KVFerryError] | None = None
        self._seqs = itertools.count(1)

    def next_seq(self) -> int:
        """A number that no request has had."""
        return next(self._seqs)

    def add_talk(self, seq: int, on_answer: OnAnswer) -> None:
        """Give all replies to `seq` to `on_answer`. Raises what the connection ended with, where it has."""
        with self._lock:
            self._check()
            self._talks[seq] = on_answer

    def add_job(self, seq: int, on_answer: OnAnswer, on_lost: OnLost, on_progress: OnProgress) -> None:
        """Give the reply that ends `seq` to `on_answer`. Raises what the connection ended with, where it has.

        `on_progress` gets the numbers of stages that come before. `on_lost` is called where the connection ends before;
        the answer, or the failure in its place, may come later.
        """
        with self._lock:
            self._check()
            self._jobs[seq] = _Job(on_answer, on_lost, on_progress)

    def drop(self, seq: int) -> None:
        """Nobody waits for replies to `seq` any more. Idempotent."""
        with self._lock:
            self._talks.pop(seq, None)
            self._jobs.pop(seq, None)

    def deliver(self, reply: Reply) -> None:
        """Give a reply to who waits for it; one that nobody waits for is dropped.

        A job that could not take its reply is still waiting, and the error goes to the caller, who ends the connection.
        """
        seq = getattr(reply, "seq", 0)
        with self._lock:
            job = self._jobs.get(seq)
            on_answer = self._talks.get(seq) or (job and job.on_answer)
        if job is not None and isinstance(reply, Progress):
            job.on_progress(reply.stages)
        elif on_answer is not None:
            on_answer(reply)
            with self._lock:
                self._jobs.pop(seq, None)

    def fail(self, error: Callable[[], KVFerryError], *, jobs_too: bool) -> bool:
        """The connection has ended: tell all talks, the jobs only with `jobs_too`. Whether any are left.

        Each is given an error of its own: one that is raised holds on to where that was.
        """
        with self._lock:
            self._ended = error
            calls: list[OnLost] = [partial(on_answer, error()) for on_answer in self._talks.values()]
            for job in self._jobs.values():
                calls.append(partial(job.on_answer, error()) if jobs_too else job.on_lost)
            if jobs_too:
                self._jobs.clear()
            left = bool(self._jobs)
        for call in calls:
            try:
                call()
            except Exception:  # noqa: BLE001 - the others are told all the same
                _LOG.exception("an answer could not be delivered")
        return left

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended()
