"""Which chunk goes first when room is needed: the free leaves of each tenant by last use, and what it holds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping

from kvferry.cache.chunk import Chunk

EVERY_TENANT = "*"
_SLACK = 64


class Quotas:
    """How many bytes of chunks each tenant may hold; the limit of "*" is for those that have none of their own."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)

    def limit(self, tenant: str) -> int | None:
        """The tenant's limit; None where it has none."""
        return self._limits.get(tenant, self._limits.get(EVERY_TENANT))


class TenantShare:
    """What one tenant holds of a pool. `leaves`, by the kind of place, have each of its chunks at most once.

    Entries may be out of date.
    """

    __slots__ = ("leaves", "limit_bytes", "num_chunks", "used_bytes")

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.num_chunks = 0
        self.leaves: dict[int, list[tuple[int, int, Chunk]]] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether the tenant could ever have a chunk of `nbytes`."""
        return self.limit_bytes is None or nbytes <= self.limit_bytes

    def excess(self, nbytes: int = 0) -> int:
        """By how many bytes the tenant would be over its limit with `nbytes` more; not above 0 where it is not."""
        return -1 if self.limit_bytes is None else self.used_bytes + nbytes - self.limit_bytes


class DirtyChunks:
    """Chunks that stay until lower tiers have done with them, oldest first. Do not change the index while iterating."""

    def __init__(self) -> None:
        self._chunks: dict[Chunk, None] = {}
        self._bytes: dict[str, int] = {}  # by tenant
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def bytes_of(self, tenant: str) -> int:
        """How many bytes the chunks of one tenant have."""
        return self._bytes.get(tenant, 0)

    def add(self, chunk: Chunk) -> None:
        """The chunk has to stay."""
        chunk.dirty = True
        self._chunks[chunk] = None
        self._count(chunk, chunk.nbytes)

    def remove(self, chunk: Chunk) -> None:
        """It may go. Idempotent."""
        if chunk.dirty:
            chunk.dirty = False
            del self._chunks[chunk]
            self._count(chunk, -chunk.nbytes)

    def _count(self, chunk: Chunk, nbytes: int) -> None:
        self.nbytes += nbytes
        left = self.bytes_of(chunk.space.tenant) + nbytes
        if left:
            self._bytes[chunk.space.tenant] = left
        else:
            del self._bytes[chunk.space.tenant]


class EvictionQueues:
    """The shares of all tenants of one pool. A tenant has one while it holds a chunk.

    An entry of a queue is out of date once its chunk has been used, or may not go any more; it is put right when it
    comes up.
    """

    def __init__(self, quotas: Quotas, kind: Callable[[int], int]) -> None:
        self._quotas = quotas
        self._kind = kind
        self._shares: dict[str, TenantShare] = {}
        self._ties = itertools.count()
        self.dirty = DirtyChunks()

    def share(self, tenant: str) -> TenantShare:
        """The tenant's share; an empty one where it holds nothing."""
        return self._shares.get(tenant) or TenantShare(self._quotas.limit(tenant))

    def shares(self) -> Mapping[str, TenantShare]:
        """The shares of those that hold something."""
        return self._shares

    def is_behind(self, tenant: str, nbytes: int) -> bool:
        """Whether `nbytes` more might have found room, were it not for dirty chunks."""
        share = self.share(tenant)
        if share.excess(nbytes) > 0:
            return share.fits(nbytes) and self.dirty.bytes_of(tenant) > 0
        return self.dirty.nbytes > 0

    def enter(self, chunk: Chunk) -> None:
        """The chunk has got a place."""
        share = self._shares.setdefault(chunk.space.tenant, self.share(chunk.space.tenant))
        share.used_bytes += chunk.nbytes
        share.num_chunks += 1

    def leave(self, chunk: Chunk) -> None:
        """Its place was given back."""
        share = self._shares[chunk.space.tenant]
        share.used_bytes -= chunk.nbytes
        share.num_chunks -= 1
        if not share.num_chunks:
            del self._shares[chunk.space.tenant]

    def queue(self, chunk: Chunk) -> None:
        """Enter a chunk among the leaves, if it is one that may go."""
        if chunk.queued or not chunk.evictable:
            return
        share = self._shares[chunk.space.tenant]
        leaves = share.leaves.setdefault(self._kind(chunk.nbytes), [])
        chunk.queued = True
        heapq.heappush(leaves, (chunk.last_use, next(self._ties), chunk))
        if len(leaves) > 2 * share.num_chunks + _SLACK:  # most are of chunks that are gone
            self._rebuild(leaves)

    def tidy(self, tenant: str) -> None:
        """Many chunks of the tenant are gone: forget them."""
        share = self.share(tenant)
        for leaves in share.leaves.values():
            if len(leaves) > 2 * share.num_chunks + _SLACK:
                self._rebuild(leaves)

    def oldest(self, tenant: str | None = None, *, kind: int | None = None) -> Chunk | None:
        """The least recently used chunk that may go, of one tenant or of all, of one kind or any. It stays queued."""
        shares = self._shares.values() if tenant is None else [self.share(tenant)]
        oldest: Chunk | None = None
        for share in shares:
            for each, leaves in share.leaves.items():
                top = self._top(leaves) if kind is None or kind == each else None
                if top is not None and (oldest is None or top.last_use < oldest.last_use):
                    oldest = top
        return oldest

    def _top(self, leaves: list[tuple[int, int, Chunk]]) -> Chunk | None:
        while leaves:
            last_use, _, chunk = leaves[0]
            if last_use == chunk.last_use and chunk.evictable:
                return chunk
            heapq.heappop(leaves)
            chunk.queued = False
            self.queue(chunk)
        return None

    def _rebuild(self, leaves: list[tuple[int, int, Chunk]]) -> None:
        entries, leaves[:] = list(leaves), []
        for _, _, chunk in entries:
            chunk.queued = chunk.evictable
            if chunk.queued:
                leaves.append((chunk.last_use, next(self._ties), chunk))
        heapq.heapify(leaves)
