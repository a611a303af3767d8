"""What happens to chunks behind the server's back, done in its own loop thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvferry.cache import Chunk, Miss
from kvferry.server import CacheServer
from kvferry.server.state import State


@dataclass(frozen=True)
class _Call:
    function: Callable[[], object]
    answer: Future[object]


class Meddler:
    """Chunks are named by the rank of the only engine, and their place in the only chain, from 1 on."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server
        self._state: State = server._parts.state
        server._parts.handlers[_Call] = lambda call: call.answer.set_result(call.function())  # type: ignore[index]

    def spoil(self, rank: int, place: int) -> None:
        """Change a bit of a chunk in memory."""
        self._in_loop(lambda: self._flip(self._chunk(rank, place)))

    def evict(self, rank: int, place: int) -> None:
        """Drop a chunk as if room had been needed."""
        self._in_loop(lambda: self._state.index.discard(self._chunk(rank, place), Miss.EVICTED))

    def lose(self, rank: int, place: int) -> None:
        """Drop a chunk, and all promises of it."""
        self._in_loop(lambda: self._lose(self._chunk(rank, place)))

    def _in_loop(self, function: Callable[[], object]) -> None:
        answer: Future[object] = Future()
        self._server._loop.post(_Call(function, answer))
        answer.result(20)

    def _chunk(self, rank: int, place: int) -> Chunk:
        engines: dict[Any, Any] = self._state.engines._engines
        (engine,) = engines.values()
        chunks = self._state.index._spaces[engine.ranks[rank].space].chunks.values()
        (chunk,) = (chunk for chunk in chunks if chunk.depth == place)
        return chunk

    def _flip(self, chunk: Chunk) -> None:
        memory = self._state.workers._memory_address
        ctypes.c_ubyte.from_address(memory + chunk.offset + chunk.nbytes // 2).value ^= 1

    def _lose(self, chunk: Chunk) -> None:
        self._state.index.discard(chunk)
        self._state.leases.lose(chunk)
