"""Lookups for an engine that stands still meanwhile: a server that does not answer is left alone for a while."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

from kvferry.client import CacheClient, Lookup
from kvferry.connectors.trtllm.requests import NO_PROMISE
from kvferry.errors import KVFerryError, ServerGoneError
from kvferry.layout import KeyContext

FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0  # each pause is twice as long as the one before
_LOG = logging.getLogger("kvferry.trtllm")


class Promises:
    """What the server promises. One thread, the executor's, which waits at most for the client's time-out.

    TensorRT-LLM asks once for a request, so there is no later. What goes wrong is logged when it begins, and answered
    as if nothing were there.
    """

    def __init__(
        self,
        client: CacheClient,
        engine_id: str,
        *,
        disk_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._engine_id = engine_id
        self._disk_wait_s = disk_wait_s
        self._clock = clock
        self._attached = False
        self._paused_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._trouble = ""

    @property
    def usable(self) -> bool:
        """Whether it makes sense to give the server work now."""
        return self._client.connected and self._clock() >= self._paused_until

    def lookup(self, name: str, tokens: array[int], context: KeyContext) -> Lookup:
        """What the server promises of `tokens`; nothing where it is gone, or too slow."""
        if not self.usable:
            return NO_PROMISE
        try:
            if not self._attached:
                self._client.attach(self._engine_id)
                self._attached = True
            found = self._client.lookup(name, tokens, context=context, wait_s=self._disk_wait_s)
        except (KVFerryError, ValueError) as error:
            self._is_wrong(error)
            return NO_PROMISE
        if self._trouble:
            _LOG.warning("the cache server answers again; KV is reused")
            self._trouble, self._pause_s = "", FIRST_PAUSE_S
        return found

    def release(self, lease_id: int) -> None:
        """Give a promise back. Idempotent."""
        if lease_id and not self._client.congested:  # an overdue lease ends by itself
            self._client.release(lease_id)

    def forget(self, name: str) -> None:
        """The request has ended."""
        self._client.end_request(name)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._client.close()

    def _is_wrong(self, error: Exception) -> None:
        if not isinstance(error, ServerGoneError):  # the client itself sees to it that a dead server costs no time
            self._paused_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if type(error).__name__ != self._trouble:
            self._trouble = type(error).__name__
            _LOG.warning("no KV is reused: a lookup failed: %s", error)
