"""Attach, lookup, release: answered in the loop thread at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import overload

from kvferry.cache import Chunk
from kvferry.errors import ProtocolError, RequestError
from kvferry.protocol.messages import KEY_BYTES, Attach, Attached, Found, Lookup, Release
from kvferry.server.engines import Engine
from kvferry.server.session import Session
from kvferry.server.state import State


class KeyRun(Sequence[bytes]):
    """The keys of a chain as they came, one after the other. Raises ProtocolError where they are no whole number."""

    def __init__(self, data: bytes) -> None:
        if len(data) % KEY_BYTES:
            raise ProtocolError(f"{len(data)} bytes of keys; each key has {KEY_BYTES}")
        self._data = data

    def __len__(self) -> int:
        return len(self._data) // KEY_BYTES

    def __iter__(self) -> Iterator[bytes]:
        size = KEY_BYTES
        return (self._data[start : start + size] for start in range(0, len(self._data), size))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._data[index * KEY_BYTES : (index + 1) * KEY_BYTES]


class Lookups:
    """The requests that only read the index, and the leases that come of them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def attach(self, session: Session, message: Attach) -> None:
        """Look up for an engine from here on; says whether all its ranks are there."""
        if session.cache is not None and session.cache.engine.key[1] != message.engine_id:
            raise RequestError("attach", f"this session is a rank of {session.cache.engine.key[1]!r} and stays with it")
        session.engine_id = message.engine_id
        engine = self._state.engines.get(session.tenant, message.engine_id)
        if engine is None or not engine.ready:
            session.send(Attached(message.seq, ready=False))
            return
        geometry = engine.geometry
        session.send(Attached(message.seq, True, geometry.chunk_tokens, geometry.block_size))

    def lookup(self, session: Session, message: Lookup) -> None:
        """Promise the longest prefix that every rank has; 0 until all ranks are there."""
        if session.engine_id is None:
            raise RequestError("attach", "a lookup needs an engine: attach(engine_id) or register first")
        self._state.counters.lookups += 1
        keys = KeyRun(message.keys)
        engine = self._state.engines.get(session.tenant, session.engine_id)
        if engine is None or not engine.ready:
            session.send(Found(message.seq, 0, 0))
            return
        chunk_tokens = engine.geometry.chunk_tokens
        shares = self._find(engine, keys)
        if not shares:
            session.send(Found(message.seq, 0, 0, chunk_tokens))
            return
        lease = self._state.leases.grant(
            session.session_id, message.request_id, scope=engine.key, shares=shares, now=time.monotonic()
        )
        session.send(Found(message.seq, lease.num_chunks * chunk_tokens, lease.lease_id, chunk_tokens))

    def release(self, session: Session, message: Release) -> None:
        """End a lease of the session's own engine; one that is gone is no error."""
        lease = self._state.leases.get(message.lease_id)
        if lease is not None and session.engine_id is not None and lease.scope == (session.tenant, session.engine_id):
            self._state.leases.release(message.lease_id)

    def _find(self, engine: Engine, keys: Sequence[bytes]) -> dict[int, Chunk]:
        """For each rank the last chunk of the longest prefix that all of them have; empty where there is none."""
        found: dict[int, Chunk] = {}
        for number, rank in engine.ranks.items():
            chunk = self._state.index.lookup(rank.space, keys)
            if chunk is None:
                return {}
            found[number] = chunk
        depth = min(chunk.depth for chunk in found.values())
        return {number: chunk.at_depth(depth) for number, chunk in found.items()}
