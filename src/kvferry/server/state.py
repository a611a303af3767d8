"""What the loop thread's handlers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from kvferry.cache import ChunkIndex, LeaseTable, MissLog, SlabPool
from kvferry.server.engines import EngineTable
from kvferry.server.refusals import Refusals
from kvferry.server.tiers.lower_tiers import LowerTiers
from kvferry.server.work.workers import Workers


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    lookups: int = 0
    chunks_hits: int = 0
    chunks_misses: int = 0
    stores: int = 0
    stores_failed: int = 0
    retrieves: int = 0
    retrieves_failed: int = 0
    bytes_stored: int = 0
    bytes_retrieved: int = 0
    chunks_damaged: int = 0
    registrations: int = 0
    sessions_broken: int = 0
    sessions_silent: int = 0


@dataclass(slots=True, eq=False)
class State:
    """All bookkeeping of one server. Only the loop thread touches it."""

    pool: SlabPool
    index: ChunkIndex
    leases: LeaseTable
    misses: MissLog
    workers: Workers
    tiers: LowerTiers
    largest_slot: int  # bytes that one chunk may have
    verify_memory: bool = False
    engines: EngineTable = field(default_factory=EngineTable)
    counters: Counters = field(default_factory=Counters)
    refusals: Refusals = field(default_factory=Refusals)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    more_values: list[Callable[[], Mapping[str, float]]] = field(default_factory=list)  # of other parts

    def values(self) -> dict[str, float]:
        """All counters and gauges by name."""
        index = {f"chunks_{name}": value for name, value in asdict(self.index.counters).items()}
        return {
            **asdict(self.counters),
            **self.refusals.values(),
            **index,
            **self.misses.values(),
            "chunks": len(self.index),
            "engines": len(self.engines),
            "leases": len(self.leases),
            "leases_expired": self.leases.num_expired,
            "memory_bytes": self.pool.capacity_bytes,
            "memory_used_bytes": self.pool.used_bytes,
            "memory_wasted_bytes": self.pool.wasted_bytes,
            **{name: value for values in self.more_values for name, value in values().items()},
        }

    def values_of(self, tenant: str) -> dict[str, float]:
        """What is a tenant's own among the gauges, and whether it can be served, which tells nothing of others."""
        every = self.values()
        num_chunks, nbytes = self.index.held_by(tenant)
        return {
            **{name: every[name] for name in ("healthy", "memory_bytes")},
            "chunks": num_chunks,
            "memory_used_bytes": nbytes,
            "engines": self.engines.count_of(tenant),
            **self.tiers.values_of(tenant),
        }
