"""Leases: what a lookup promised, pinned until it was taken, released, or is overdue.

A lease belongs to one request of one session, and holds a share of chunks for every rank of the engine. It is undone
with the very chunks that it pinned, so no release can ever touch what another request holds. A chunk that turns out to
be of no use cuts all promises of it, and those for every rank alike.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kvferry.cache.chunk import Chunk
from kvferry.cache.index import ChunkIndex

MAX_LEASES = 4096  # of one session


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to each rank that is still in `shares`, by the last chunk; None where it is cut down to nothing.

    `num_promised` chunks were promised, the first `num_chunks` of these can be delivered still. They come after the
    first `before` chunks of their chain, which are no part of the promise.
    """

    lease_id: int
    owner: Hashable
    scope: Hashable
    request_id: str
    num_promised: int
    expires_at: float
    num_shares: int
    before: int
    shares: dict[int, Chunk | None] = field(default_factory=dict)
    num_chunks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_chunks = self.num_promised

    def promises_all_of(self, shares: Mapping[int, Chunk], before: int) -> bool:
        """Whether it promises just that, still."""
        return self.shares == shares and self.before == before and self.num_chunks == self.num_promised

    def promises(self, chunk: Chunk) -> bool:
        """Whether the chunk is a part of any share's chain."""
        shares = (share for share in self.shares.values() if share is not None and share.space == chunk.space)
        return any(share.depth >= chunk.depth and share.at_depth(chunk.depth) is chunk for share in shares)


class LeaseTable:
    """All leases. Times are the caller's clock, in seconds. Not thread-safe: one thread owns it."""

    def __init__(self, index: ChunkIndex, ttl_s: float) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # the one that expires first comes first
        self._owned: dict[Hashable, dict[int, Lease]] = {}
        self._requests: dict[tuple[Hashable, str], Lease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        owner: Hashable,
        request_id: str,
        *,
        scope: Hashable,
        shares: Mapping[int, Chunk],
        now: float,
        before: int = 0,
    ) -> Lease | None:
        """Pin `shares` (for each rank the last chunk of its chain, all of one depth) for a request.

        What comes after the first `before` chunks of the chains is promised.
        The request's earlier lease is kept, with a new term, where it promises the same; else it is replaced. One that
        some rank has taken its share of already is left to the others, beside the new one. None where the owner would
        have more than `MAX_LEASES`.
        """
        (depth,) = {share.depth for share in shares.values()}
        old = self._requests.get((owner, request_id))
        if old is not None and old.promises_all_of(shares, before):
            old.expires_at = now + self._ttl_s
            self._leases.move_to_end(old.lease_id)
            return old
        replaced = old is not None and len(old.shares) == old.num_shares
        if len(self._owned.get(owner, ())) - replaced >= MAX_LEASES:
            return None
        lease_id = secrets.randbits(62) | 1
        lease = Lease(
            lease_id,
            owner,
            scope,
            request_id,
            depth - before,
            now + self._ttl_s,
            num_shares=len(shares),
            before=before,
            shares=dict(shares),
        )
        for share in shares.values():
            self._index.pin(share)
        if old is not None and replaced:
            self.release(old.lease_id)
        self._leases[lease_id] = self._owned.setdefault(owner, {})[lease_id] = lease
        self._requests[owner, request_id] = lease
        return lease

    def get(self, lease_id: int) -> Lease | None:
        """The lease, while it is alive."""
        return self._leases.get(lease_id)

    def take(self, lease_id: int, rank: int) -> None:
        """A rank has its share: unpin it. The lease ends with its last share. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        share = lease.shares.pop(rank, None)
        if share is not None:
            self._index.unpin(share)
        if not lease.shares:
            self.release(lease_id)

    def cut(self, lease_id: int, num_chunks: int) -> None:
        """No more than the first `num_chunks` can be delivered, to whatever rank. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None or num_chunks >= lease.num_chunks:
            return
        lease.num_chunks = num_chunks
        for rank, share in lease.shares.items():
            assert share is not None, "it had chunks, so each share had"
            rest = share.at_depth(lease.before + num_chunks) if num_chunks else None
            if rest is not None:
                self._index.pin(rest)
            self._index.unpin(share)
            lease.shares[rank] = rest

    def lose(self, chunk: Chunk) -> int:
        """Cut all promises of a chunk that cannot be delivered; how many there were."""
        spoilt = [lease for lease in self._leases.values() if lease.promises(chunk)]
        for lease in spoilt:
            self.cut(lease.lease_id, max(0, chunk.depth - 1 - lease.before))
        return len(spoilt)

    def release(self, lease_id: int) -> bool:
        """End a lease and unpin what is left of it. Idempotent: False where it is gone already."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        owned = self._owned[lease.owner]
        del owned[lease_id]
        if not owned:
            del self._owned[lease.owner]
        if self._requests.get((lease.owner, lease.request_id)) is lease:
            del self._requests[lease.owner, lease.request_id]
        for share in lease.shares.values():
            if share is not None:
                self._index.unpin(share)
        return True

    def release_owner(self, owner: Hashable) -> int:
        """End all leases of a session; how many there were."""
        return sum(self.release(lease_id) for lease_id in list(self._owned.get(owner, ())))

    def expire(self, now: float) -> int:
        """End the leases that are overdue; how many there were."""
        overdue: list[int] = []
        for lease in self._leases.values():
            if lease.expires_at > now:
                break
            overdue.append(lease.lease_id)
        self.num_expired += len(overdue)
        return sum(self.release(lease_id) for lease_id in overdue)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        lease = next(iter(self._leases.values()), None)
        return None if lease is None else lease.expires_at
