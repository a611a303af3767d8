"""What is asked about prompts: how much of them is there, what is to be loaded, what is to be forgotten."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvferry.client.connection import Connection
from kvferry.client.keys import RequestKeys
from kvferry.client.link import Link
from kvferry.client.presence import Presence
from kvferry.errors import DeadlineError, RequestError, ServerGoneError
from kvferry.layout import ChunkKeys, KeyContext, chain_hashes
from kvferry.protocol import messages
from kvferry.protocol.messages import Cleared, Found, Prefetched

_LOG = logging.getLogger(__name__)

_LOWER_TIERS_VERSION = 2  # of the protocol

_T = TypeVar("_T")


class Lookup(NamedTuple):
    """`tokens` at the start of the prompt are promised under `lease_id`, which is 0 where there are none.

    Up to `coming` more are on their way into the server's memory: another lookup may find them.
    """

    tokens: int
    lease_id: int
    coming: int = 0


class Prefetch(NamedTuple):
    """`tokens` at the start of the prompt are in the server's memory, up to `coming` more on their way there."""

    tokens: int
    coming: int


_NOT_FOUND = Lookup(0, 0)
_NOT_THERE = Prefetch(0, 0)
_CLEAR_S = 70.0  # longer than the server takes for its answer


class Lookups:
    """Asks for one client. Any thread may; what a server that is gone cannot answer is a miss.

    One that lives and does not answer in time is another thing: the caller has waited, and should leave the server
    alone for a while rather than wait again for the next prompt. So that is raised, and counted.
    """

    def __init__(self, connection: Connection, presence: Presence, timeout_s: float) -> None:
        self._connection = connection
        self._presence = presence
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the keys; held while some are hashed
        self._keys = RequestKeys()
        self._late_lock = threading.Lock()  # guards what follows
        self._told_late = False
        self._num_late = 0

    @property
    def late(self) -> str:
        """What there is to say of answers that did not come in time, to go on with; nothing where all have."""
        return f", {self._num_late} lookups not answered in time" if self._num_late else ""

    def keys(self, request_id: str | None, tokens: Any, chunk_tokens: int, context: KeyContext) -> bytes:
        """The keys of all whole chunks; of a request, only tokens that it had not before are hashed."""
        if isinstance(tokens, ChunkKeys):
            return tokens.data
        if request_id is None:
            return chain_hashes(tokens, chunk_tokens, context)
        with self._lock:
            return self._keys.keys(request_id, tokens, chunk_tokens, context)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        with self._lock:
            self._keys.forget(request_id)

    def lookup(self, request_id: str, tokens: Any, context: KeyContext, *, wait_s: float) -> Lookup:
        """See `CacheClient.lookup`."""

        def ask(link: Link, chunk_tokens: int) -> Lookup:
            engine_id = self._presence.engine_id
            for _ in range(2):  # an engine that came back with other blocks is asked for again, once
                keys = self.keys(request_id, tokens, chunk_tokens, context)
                if not keys:
                    break
                send = functools.partial(messages.Lookup, request_id=request_id, keys=keys, wait_s=wait_s)
                found = link.call(send, Found, self._timeout_s + wait_s)
                if found.chunk_tokens in (0, chunk_tokens):
                    return Lookup(found.tokens, found.lease_id, found.coming)
                chunk_tokens = found.chunk_tokens
                self._presence.learn(engine_id, chunk_tokens)
            return _NOT_FOUND

        return self._ask(ask, _NOT_FOUND)

    def prefetch(self, tokens: Any, context: KeyContext) -> Prefetch:
        """See `CacheClient.prefetch`."""

        def ask(link: Link, chunk_tokens: int) -> Prefetch:
            _need_lower_tiers(link, "prefetch")
            keys = self.keys(None, tokens, chunk_tokens, context)
            if not keys:
                return _NOT_THERE
            there = link.call(lambda seq: messages.Prefetch(seq, keys), Prefetched, self._timeout_s)
            return Prefetch(there.tokens, there.coming)

        return self._ask(ask, _NOT_THERE)

    def clear(self, tokens: Any, context: KeyContext) -> int:
        """See `CacheClient.clear`."""
        link = self._link()
        if link is None:
            raise self._connection.gone()
        _need_lower_tiers(link, "clear")
        keys = b""
        if tokens is not None:
            chunk_tokens = self._presence.known_chunk_tokens(link)
            keys = self.keys(None, tokens, chunk_tokens, context) if chunk_tokens > 0 else b""
            if not keys:  # not a chunk; no keys at all would stand for everything
                return 0
        return link.call(lambda seq: messages.Clear(seq, keys), Cleared, max(_CLEAR_S, self._timeout_s)).num_chunks

    def _ask(self, ask: Callable[[Link, int], _T], nothing: _T) -> _T:
        """What `ask(link, chunk_tokens)` gives; `nothing` while there is no server, or not all ranks of the engine."""
        link = self._link()
        if link is None:
            return nothing
        try:
            chunk_tokens = self._presence.known_chunk_tokens(link)
            answer = ask(link, chunk_tokens) if chunk_tokens > 0 else nothing
        except ServerGoneError:
            self._connection.check()  # closed meanwhile is another thing than cut off
            return nothing
        except DeadlineError as error:
            self._is_late(error)
            raise
        self._told_late = False  # one store, which needs no lock
        return answer

    def _is_late(self, error: DeadlineError) -> None:
        """Count it; it is logged once until the server answers again."""
        with self._late_lock:
            self._num_late += 1
            told, self._told_late = self._told_late, True
        if not told:
            _LOG.warning("a lookup failed: %s; this is told once until the server answers again", error)

    def _link(self) -> Link | None:
        link = self._connection.link()
        if self._presence.engine_id is None:
            raise ValueError("no engine to look up for; call register_kv_caches() or attach() first")
        return link


def _need_lower_tiers(link: Link, what: str) -> None:
    version = link.greeting.version
    if version < _LOWER_TIERS_VERSION:
        text = f"the server speaks protocol {version}, which has no {what}; it needs {_LOWER_TIERS_VERSION}: update it"
        raise RequestError("version", text)
