"""Lookups for a scheduler that may not wait: a server that does not answer is left alone for a while."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

from kvferry.client import CacheClient, Lookup
from kvferry.errors import KVFerryError, ServerGoneError
from kvferry.layout import KeyContext

ANSWER_S = 2.0  # how long the scheduler, and with it the engine, stands still for an answer
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0  # each pause is twice as long as the one before
_NOTHING = Lookup(0, 0)
_LOG = logging.getLogger("vllm.kvferry")


class Promises:
    """The scheduler's client. What goes wrong is logged when it begins, and answered as if nothing were there."""

    def __init__(self, client: CacheClient, engine_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._engine_id = engine_id
        self._clock = clock
        self._attached = False
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
        return not self.paused and self._client.connected

    def lookup(self, name: str, tokens: array[int], context: KeyContext) -> Lookup:
        """What the server promises of `tokens` now; nothing where it is gone, or was too slow."""
        if not self.usable:
            return _NOTHING
        try:
            if not self._attached:
                self._client.attach(self._engine_id)
                self._attached = True
            found = self._client.lookup(name, tokens, context=context)
        except KVFerryError as error:
            self._failed(error)
            return _NOTHING
        if self._trouble:
            _LOG.warning("the cache server answers again; KV is reused")
            self._trouble, self._pause_s = "", FIRST_PAUSE_S
        return found

    def release(self, lease_id: int) -> None:
        """Give a promise back. Idempotent."""
        if lease_id == 0 or not self.usable:  # an overdue lease ends by itself
            return
        try:
            self._client.release(lease_id)
        except KVFerryError as error:
            self._failed(error)

    def forget(self, name: str) -> None:
        """The request has ended."""
        self._client.end_request(name)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._client.close()

    def _failed(self, error: KVFerryError) -> None:
        if not isinstance(error, ServerGoneError):  # the client itself sees to it that a dead server costs no time
            self._paused_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if type(error).__name__ != self._trouble:
            self._trouble = type(error).__name__
            _LOG.warning("no KV is reused: a lookup failed: %s", error)
