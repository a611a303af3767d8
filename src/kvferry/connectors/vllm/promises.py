"""Lookups for a scheduler that may not wait: a server that does not answer is left alone for a while."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

from kvferry.client import CacheClient, Lookup
from kvferry.connectors.vllm.asker import NOTHING, Asker, Question
from kvferry.errors import ServerGoneError
from kvferry.layout import KeyContext

ANSWER_S = 2.0  # after which a server counts as one that does not answer
# How long the scheduler, and with it the engine, stands still for an answer. Most come within a tenth of that.
PATIENCE_S = 0.005
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0  # each pause is twice as long as the one before
_LOG = logging.getLogger("vllm.kvferry")


class Promises:
    """What the server promises. What goes wrong is logged when it begins, and answered as if nothing were there.

    One thread, the scheduler's. Another asks the server (see `Asker`), so that an answer that does not come at once is
    one that is not there yet.
    """

    def __init__(self, client: CacheClient, engine_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._asker = Asker(client, engine_id)
        self._clock = clock
        self._open: dict[str, Question] = {}
        self._paused_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._trouble = ""

    @property
    def paused(self) -> bool:
        """Whether the server has just failed to answer, so that nothing should be begun with it."""
        return self._clock() < self._paused_until

    @property
    def usable(self) -> bool:
        """Whether it makes sense to give the server work now."""
        return not self.paused and self._asker.connected

    def lookup(self, name: str, tokens: array[int], context: KeyContext) -> Lookup | None:
        """What the server promises of `tokens` now; nothing where it is gone, or too slow. None: ask again."""
        question = self._open.get(name)
        if question is not None and (self.paused or (len(question.tokens), question.context) != (len(tokens), context)):
            self.withdraw(name)
            question = None
        if question is None:
            if not self.usable:
                return NOTHING
            busy = bool(self._open)
            question = self._open[name] = Question(name, tokens, context)
            self._asker.ask(question)
            if not busy:
                question.done.wait(PATIENCE_S)
        if not question.done.is_set():
            return None
        del self._open[name]
        return self._answer(question)

    def withdraw(self, name: str) -> None:
        """Nobody asks for this request any more. Idempotent."""
        question = self._open.pop(name, None)
        if question is not None:
            self._asker.withdraw(question)

    def release(self, lease_id: int) -> None:
        """Give a promise back. Idempotent."""
        if lease_id != 0 and self.usable:  # an overdue lease ends by itself
            self._asker.release(lease_id)

    def forget(self, name: str) -> None:
        """The request has ended."""
        self.withdraw(name)
        self._asker.forget(name)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._asker.close()

    def _answer(self, question: Question) -> Lookup:
        error = question.error
        if error is None:
            if self._trouble:
                _LOG.warning("the cache server answers again; KV is reused")
                self._trouble, self._pause_s = "", FIRST_PAUSE_S
            return question.found
        if not isinstance(error, ServerGoneError):  # the client itself sees to it that a dead server costs no time
            self._paused_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if type(error).__name__ != self._trouble:
            self._trouble = type(error).__name__
            _LOG.warning("no KV is reused: a lookup failed: %s", error)
        return NOTHING
