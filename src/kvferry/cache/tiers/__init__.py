"""The lower tiers of the cache: places that keep chunks longer, or more of them, than host memory."""

from kvferry.cache.tiers.disk import DiskTier, StoredChunk
from kvferry.cache.tiers.tier import ChunkMeta, ChunkName, Tier

__all__ = ["ChunkMeta", "ChunkName", "DiskTier", "StoredChunk", "Tier"]
