"""Attach, lookup, release: answered in the loop thread at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvferry.cache import Chunk
from kvferry.errors import ProtocolError, RequestError
from kvferry.protocol.messages import KEY_BYTES, Attach, Attached, Found, Lookup, Release
from kvferry.server.engines import Engine
from kvferry.server.session import Session
from kvferry.server.state import State


def split_keys(keys: bytes) -> list[bytes]:
    """The single keys of a chain. Raises ProtocolError where the bytes are no whole number of them."""
    if len(keys) % KEY_BYTES:
        raise ProtocolError(f"{len(keys)} bytes of keys; each key has {KEY_BYTES}")
    split: list[bytes] = np.frombuffer(keys, dtype=f"V{KEY_BYTES}").tolist()  # five times as fast as slicing
    return split


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
        keys = split_keys(message.keys)
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

    def _find(self, engine: Engine, keys: Sequence[bytes]) -> dict[int, Sequence[Chunk]]:
        """For each rank its chunks of the longest prefix that all of them have; empty where there is none."""
        shares: dict[int, Sequence[Chunk]] = {}
        for number, rank in engine.ranks.items():
            shares[number] = self._state.index.lookup(rank.namespace, keys)
            keys = keys[: len(shares[number])]
            if not keys:
                return {}
        return {number: share[: len(keys)] for number, share in shares.items()}
