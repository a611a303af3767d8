"""Who waits for which answer of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.protocol.messages import Reply

Answer = Reply | KVFerryError
OnAnswer = Callable[[Answer], None]


class Waiting:
    """Talks, which get any number of replies until they are dropped, and jobs, which get one. Thread-safe.

    Some jobs are late: the server may be writing into our memory for them, so that their end is not known when the
    connection ends, but only when the server's process has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while an answer is given
        self._talks: dict[int, OnAnswer] = {}
        self._jobs: dict[int, OnAnswer] = {}
        self._late: set[int] = set()
        self._ended: KVFerryError | None = None

    def add_talk(self, seq: int, on_answer: OnAnswer) -> None:
        """Give all replies to `seq` to `on_answer`. Raises what the connection ended with, where it has."""
        with self._lock:
            self._check()
            self._talks[seq] = on_answer

    def add_job(self, seq: int, on_answer: OnAnswer, *, late: bool) -> None:
        """Give the one reply to `seq` to `on_answer`. Raises what the connection ended with, where it has."""
        with self._lock:
            self._check()
            self._jobs[seq] = on_answer
            if late:
                self._late.add(seq)

    def drop(self, seq: int) -> None:
        """Nobody waits for replies to `seq` any more. Idempotent."""
        with self._lock:
            self._talks.pop(seq, None)
            self._jobs.pop(seq, None)
            self._late.discard(seq)

    def deliver(self, reply: Reply) -> None:
        """Give a reply to who waits for it; one that nobody waits for is dropped."""
        seq = getattr(reply, "seq", 0)
        with self._lock:
            on_answer = self._talks.get(seq)
            if on_answer is None:
                on_answer = self._jobs.pop(seq, None)
                self._late.discard(seq)
        if on_answer is not None:
            on_answer(reply)

    def fail(self, error: KVFerryError, *, late_too: bool) -> bool:
        """The connection has ended: tell all, the late jobs only with `late_too`. Whether any are left."""
        with self._lock:
            self._ended = error
            failed = list(self._talks.values())
            for seq in [seq for seq in self._jobs if late_too or seq not in self._late]:
                failed.append(self._jobs.pop(seq))
            left = bool(self._jobs)
        for on_answer in failed:
            on_answer(error)
        return left

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
