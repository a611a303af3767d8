"""Which chunks are kept: their index, their places, the leases on them. No GPU, no memory, no clients."""

from kvferry.cache.index import Chunk, ChunkIndex, ChunkState, IndexCounters, Reservation
from kvferry.cache.leases import Lease, LeaseTable
from kvferry.cache.pool import SlabPool, slot_bytes

__all__ = [
    "Chunk",
    "ChunkIndex",
    "ChunkState",
    "IndexCounters",
    "Lease",
    "LeaseTable",
    "Reservation",
    "SlabPool",
    "slot_bytes",
]
