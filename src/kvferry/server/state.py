"""What the loop thread's handlers share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from kvferry.cache import ChunkIndex, LeaseTable, SlabPool
from kvferry.server.engines import EngineTable
from kvferry.server.workers import Workers


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    lookups: int = 0
    stores: int = 0
    stores_failed: int = 0
    retrieves: int = 0
    retrieves_failed: int = 0
    bytes_stored: int = 0
    bytes_retrieved: int = 0
    registrations: int = 0
    registrations_refused: int = 0
    sessions_refused: int = 0
    sessions_broken: int = 0


@dataclass(slots=True, eq=False)
class State:
    """All bookkeeping of one server. Only the loop thread touches it."""

    pool: SlabPool
    index: ChunkIndex
    leases: LeaseTable
    workers: Workers
    largest_slot: int  # bytes that one chunk may have
    engines: EngineTable = field(default_factory=EngineTable)
    counters: Counters = field(default_factory=Counters)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def values(self) -> dict[str, float]:
        """All counters and gauges by name."""
        index = {f"chunks_{name}": value for name, value in asdict(self.index.counters).items()}
        return {
            **asdict(self.counters),
            **index,
            "chunks": len(self.index),
            "engines": len(self.engines),
            "leases": len(self.leases),
            "leases_expired": self.leases.num_expired,
            "memory_bytes": self.pool.capacity_bytes,
            "memory_used_bytes": self.pool.used_bytes,
        }
