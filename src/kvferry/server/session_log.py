"""What is logged of sessions: who connected, registered, ended, and who was refused."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from kvferry.server.session import RankCache, Session

_LOG = logging.getLogger(__name__)

_BURST = 10
_PER_S = 60.0
_MAX_TEXT = 500


class RateLimit:
    """Lets `burst` pass in any `per_s` seconds, and counts the others."""

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._begun_at = float("-inf")
        self._num_passed = 0
        self._num_left_out = 0

    def passes(self, now: float) -> int | None:
        """How many did not pass since the last that did; None where this one does not."""
        if now - self._begun_at >= self._per_s:
            self._begun_at, self._num_passed = now, 0
        if self._num_passed >= self._burst:
            self._num_left_out += 1
            return None
        self._num_passed += 1
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


@dataclass(slots=True)
class _End:
    """A session on its way out, as it was when that began."""

    begun_at: float
    held_bytes: int
    fields: dict[str, Any]
    unmapped: bool = True


class SessionLog:
    """One record at info for each step of a session; belongs to the loop thread.

    All have the fields session, tenant, engine, rank and client, None where there is nothing to say. Nobody can fill
    the log by being refused: those records have a limit, one for peers that are not welcome and one for sessions.
    Neither secrets nor keys of chunks are in them.
    """

    def __init__(self) -> None:
        self._strangers = RateLimit(_BURST, _PER_S)
        self._members = RateLimit(_BURST, _PER_S)
        self._registered: dict[Session, RankCache] = {}  # the last of each, which it may have unregistered
        self._ends: dict[Session, _End] = {}

    def connected(self, session: Session) -> None:
        """The session was welcomed."""
        greeting = session.greeting
        over = "tcp" if greeting.remote else "unix"
        _info("session %d connected", session, protocol=greeting.version, transport=over)

    def registered(self, session: Session, cache: RankCache) -> None:
        """The session's KV cache is live."""
        self._registered[session] = cache
        _info("session %d registered a KV cache", session, cache, held_bytes=cache.nbytes, device=cache.worker.name)

    def ending(self, session: Session, held_bytes: int) -> None:
        """The session is about to end, and to lose its KV cache; `held_bytes` are mapped now."""
        registered = self._registered.pop(session, None)
        if session.welcome:
            self._ends[session] = _End(time.monotonic(), held_bytes, _fields(session, session.cache or registered))

    def still_mapped(self, session: Session) -> None:
        """Memory of the session was not unmapped in time."""
        if session in self._ends:
            self._ends[session].unmapped = False

    def ended(self, session: Session) -> None:
        """The session has ended, and what it held is unmapped unless the contrary was said. Idempotent."""
        end = self._ends.pop(session, None)
        if end is None:
            return
        took_ms = round((time.monotonic() - end.begun_at) * 1e3, 3) if end.unmapped else None
        extra = {**end.fields, "why": _cut(session.end_text), "held_bytes": end.held_bytes, "unmapped_ms": took_ms}
        _LOG.info("session %d ended", session.session_id, extra=extra)

    def refused(self, session: Session | None, code: str, text: str) -> None:
        """A peer, which may not have come as far as being a session, is not welcome."""
        left_out = self._strangers.passes(time.monotonic())
        if left_out is None:
            return
        why = "it did not prove that it has a token of this server" if code == "token" else _cut(text)
        extra = {**_fields(session, None), "code": code, "why": why, "left_out": left_out}
        _LOG.info("a peer was refused", extra=extra)

    def refused_cache(self, session: Session, names: tuple[str, int], code: str, text: str) -> None:
        """A KV cache was not taken; `names` are those of its engine and rank."""
        left_out = self._members.passes(time.monotonic())
        if left_out is not None:
            engine, rank = names
            extra = {**_fields(session, None), "engine": engine, "rank": rank, "code": code, "why": _cut(text)}
            _LOG.info("session %d: its KV cache was refused", session.session_id, extra={**extra, "left_out": left_out})


def _info(text: str, session: Session, cache: RankCache | None = None, **extra: object) -> None:
    _LOG.info(text, session.session_id, extra={**_fields(session, cache), **extra})


def _fields(session: Session | None, cache: RankCache | None) -> dict[str, Any]:
    hello = None if session is None else session.greeting.hello
    return {
        "session": None if session is None else session.session_id,
        "tenant": None if session is None else session.tenant or None,
        "engine": None if cache is None else cache.engine.key[1],
        "rank": None if cache is None else cache.rank,
        "client": None if hello is None else hello.client,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
