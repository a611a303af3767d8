"""Which chunks are kept: their index, their places, the leases on them. No GPU, no memory, no clients."""

from kvferry.cache.byte_pool import BytePool
from kvferry.cache.chunk import Chunk, ChunkState, IndexCounters, Reservation, Space
from kvferry.cache.eviction import Quotas
from kvferry.cache.index import ChunkIndex
from kvferry.cache.leases import Lease, LeaseTable
from kvferry.cache.misses import Miss, MissLog
from kvferry.cache.pool import Pool, SlabPool, slot_bytes

__all__ = [
    "BytePool",
    "Chunk",
    "ChunkIndex",
    "ChunkState",
    "IndexCounters",
    "Lease",
    "LeaseTable",
    "Miss",
    "MissLog",
    "Pool",
    "Quotas",
    "Reservation",
    "SlabPool",
    "Space",
    "slot_bytes",
]
