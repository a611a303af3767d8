"""Attach, lookup, release, prefetch, clear: answered in the loop thread, at once or when loads have ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.cache import Chunk, Miss
from kvferry.errors import RequestError
from kvferry.protocol.messages import (
    Attach,
    Attached,
    Clear,
    Cleared,
    Error,
    Found,
    Lookup,
    Prefetch,
    Prefetched,
    Release,
)
from kvferry.server.engines import Engine
from kvferry.server.key_run import KeyRun
from kvferry.server.pending import PendingLookup, PendingLookups
from kvferry.server.session import Session
from kvferry.server.state import State
from kvferry.server.tiers.fetches import Fetch


@dataclass(frozen=True, slots=True)
class _Search:
    """What memory has of a chain: for each rank the last chunk of what is there, and what is on its way.

    The keys go on after the first `before` chunks of the chain.
    """

    engine: Engine
    keys: Sequence[bytes]
    found: Mapping[int, Chunk | None]
    fetches: Mapping[int, Fetch | None]
    before: int

    @property
    def depth(self) -> int:
        """How many chunks every rank has."""
        return min(map(self.have, self.found))

    @property
    def coming(self) -> int:
        """How many more every rank may have soon, at most."""
        coming = ((rank, self.fetches.get(rank)) for rank in self.found)
        most = min(self.have(rank) + (0 if fetch is None else fetch.coming) for rank, fetch in coming)
        return min(most, len(self.keys)) - self.depth

    @property
    def shares(self) -> dict[int, Chunk]:
        """For each rank the last chunk of what every rank has; empty where that is nothing."""
        depth = self.depth
        return (
            {} if not depth else {rank: last.at_depth(self.before + depth) for rank, last in self.found.items() if last}
        )

    def have(self, rank: int) -> int:
        """How many chunks a rank has."""
        last = self.found[rank]
        return 0 if last is None else last.depth - self.before


class Lookups:
    """The requests that read the index, and the leases that come of them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._pending = PendingLookups(self._answer_pending)
        state.more_values.append(lambda: {"lookups_waiting": len(self._pending)})

    def attach(self, session: Session, message: Attach) -> None:
        """Look up for an engine from here on; says whether all its ranks are there."""
        if session.cache is not None and session.cache.engine.key[1] != message.engine_id:
            raise RequestError("attach", f"this session is a rank of {session.cache.engine.key[1]!r} and stays with it")
        session.engine_id = message.engine_id
        engine = self._ready_engine(session)
        if engine is None:
            session.send(Attached(message.seq, ready=False))
            return
        geometry = engine.geometry
        session.send(Attached(message.seq, True, geometry.chunk_tokens, geometry.block_size))

    def lookup(self, session: Session, message: Lookup) -> None:
        """Promise the longest prefix that every rank has; 0 until all ranks are there.

        Keys that go on where a chain is known already are found in memory only: lower tiers are asked for whole chains.
        What is in memory is promised before anything is loaded, so that no load takes its place.
        """
        keys = KeyRun(message.keys)
        engine = self._ready_engine(session)
        self._state.counters.lookups += 1
        if engine is None:
            self._count_miss(Miss.NOT_READY, keys)
            session.send(Found(message.seq, 0, 0))
            return
        search = self._search(engine, keys)
        lease_id = self._promise(session, message.request_id, search)
        search = self._fetch(search)
        if search.coming and message.wait_s:
            fetches = {rank: fetch for rank, fetch in search.fetches.items() if fetch is not None}
            if self._pending.add(session, message, fetches, time.monotonic() + message.wait_s):
                return
        self._answer(session, message, search, lease_id)

    def prefetch(self, session: Session, message: Prefetch) -> None:
        """Begin to load what lower tiers have; says how much memory has, and how much may come."""
        keys = KeyRun(message.keys)
        engine = self._ready_engine(session)
        if engine is None:
            session.send(Prefetched(message.seq, 0, 0))
            return
        search = self._fetch(self._search(engine, keys))
        chunk_tokens = engine.geometry.chunk_tokens
        session.send(Prefetched(message.seq, search.depth * chunk_tokens, search.coming * chunk_tokens))

    def clear(self, session: Session, message: Clear) -> None:
        """Forget a chain from some chunk on, or all of the engine, in all tiers; answered once it is deleted there."""
        keys = KeyRun(message.keys)
        engine = self._ready_engine(session)
        if engine is None:
            raise RequestError(
                "not_ready", "not all ranks of the engine are registered, and only theirs can be cleared"
            )
        num_chunks = 0

        def answer(text: str) -> None:
            why = f"what was cleared is not used any more, but may come back from a lower tier: {text}; clear it again"
            session.send(Error(message.seq, "tier", why) if text else Cleared(message.seq, num_chunks))

        ending = self._state.tiers.clearing(answer)
        for rank in engine.ranks.values():
            if not keys:
                num_chunks += self._state.index.forget_space(rank.space)
                self._state.tiers.clear(rank.space, ending=ending)
            elif message.start_chunk < len(keys):
                chunk = self._state.index.find(rank.space, keys[message.start_chunk])
                num_chunks += 0 if chunk is None else self._state.index.discard(chunk)
                self._state.tiers.clear(rank.space, keys, message.start_chunk, ending=ending)
        ending.end()

    def release(self, session: Session, message: Release) -> None:
        """End a lease of the session's own engine; one that is gone is no error."""
        lease = self._state.leases.get(message.lease_id)
        if lease is not None and session.engine_id is not None and lease.scope == (session.tenant, session.engine_id):
            self._state.leases.release(message.lease_id)

    def drop(self, session: Session) -> None:
        """The session has ended: its lookups get no answer."""
        self._pending.drop(session)

    def tick(self, now: float) -> None:
        """Answer the lookups that have waited long enough."""
        self._pending.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return self._pending.next_deadline()

    def _ready_engine(self, session: Session) -> Engine | None:
        """The session's engine, once all its ranks are there."""
        if session.engine_id is None:
            raise RequestError("attach", "this needs an engine: attach(engine_id) or register first")
        engine = self._state.engines.get(session.tenant, session.engine_id)
        return engine if engine is not None and engine.ready else None

    def _search(self, engine: Engine, keys: Sequence[bytes]) -> _Search:
        """Every rank has the same chain before the keys: mostly none, and always where they come from tokens."""
        index = self._state.index
        firsts = [index.find(rank.space, keys[0]) for rank in engine.ranks.values()] if keys else []
        befores = {first.depth - 1 for first in firsts if first is not None}
        before = befores.pop() if len(befores) == 1 else 0
        found = {number: index.lookup(rank.space, keys, before) for number, rank in engine.ranks.items()}
        return _Search(engine, keys, found, {}, before)

    def _fetch(self, search: _Search) -> _Search:
        """Begin to load what is missing."""
        tiers, engine, keys = self._state.tiers, search.engine, search.keys
        fetches: dict[int, Fetch | None] = {}
        for rank in search.found if not search.before else ():
            have = search.have(rank)
            if have < len(keys):
                space = engine.ranks[rank].space
                fetches[rank] = tiers.fetch(space, keys, have, engine.geometry.chunk_bytes)
        return _Search(engine, keys, search.found, fetches, search.before)

    def _promise(self, session: Session, request_id: str, search: _Search) -> int:
        """A lease on what every rank has, 0 where that is nothing, or the session may have no more leases."""
        shares = search.shares
        if not shares:
            return 0
        for share in shares.values():
            self._state.tiers.on_used(share)
        lease = self._state.leases.grant(
            session.session_id,
            request_id,
            scope=search.engine.key,
            shares=shares,
            now=time.monotonic(),
            before=search.before,
        )
        return 0 if lease is None else lease.lease_id

    def _answer_pending(self, pending: PendingLookup) -> None:
        """Look again: the engine, too, may be another one by now."""
        session, message, keys = pending.session, pending.message, KeyRun(pending.message.keys)
        engine = None if session.engine_id is None else self._ready_engine(session)
        if engine is None:
            self._count_miss(Miss.NOT_READY, keys)
            session.send(Found(message.seq, 0, 0))
            return
        search = self._search(engine, keys)
        search = _Search(engine, keys, search.found, pending.fetches, search.before)
        self._answer(session, message, search, self._promise(session, message.request_id, search))

    def _answer(self, session: Session, message: Lookup, search: _Search, lease_id: int) -> None:
        depth, coming = search.depth if lease_id else 0, search.coming
        counters, num_keys = self._state.counters, len(search.keys)
        for rank in search.found:
            found = search.have(rank)
            counters.chunks_hits += found
            counters.chunks_misses += num_keys - found
        if depth < search.depth:
            self._state.misses.count(Miss.LEASES)
        elif depth < num_keys:
            self._state.misses.count(Miss.TIMED_OUT if coming else self._why(search))
        chunk_tokens = search.engine.geometry.chunk_tokens
        session.send(Found(message.seq, depth * chunk_tokens, lease_id, chunk_tokens, coming * chunk_tokens))

    def _why(self, search: _Search) -> Miss:
        """What became of the first chunk that not every rank has."""
        index, misses, key = self._state.index, self._state.misses, search.keys[search.depth]
        spaces = [rank.space for rank in search.engine.ranks.values()]
        for space in spaces:
            note = misses.reason(space, key)
            if note is not None:
                return note
        return Miss.GEOMETRY if index.is_elsewhere(key, spaces) else Miss.NOT_STORED

    def _count_miss(self, reason: Miss, keys: Sequence[bytes]) -> None:
        if len(keys):
            self._state.misses.count(reason)
