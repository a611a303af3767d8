"""What hangs from what, and how long each chunk keeps its place: the part of the index that knows no policy."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvferry.cache.chunk import Chunk, ChunkState, Listing, Space
from kvferry.cache.eviction import DirtyChunks, EvictionQueues
from kvferry.cache.misses import MissLog
from kvferry.cache.pool import Pool
from kvferry.cache.runs import Runs

SWEPT_AT_ONCE = 64  # some 0.2 ms


class ChunkTree:
    """Chunks by space and key, and their places in `pool`. A place is kept while a writer or a pin needs it."""

    def __init__(self, pool: Pool, queues: EvictionQueues, misses: MissLog) -> None:
        self._pool = pool
        self._queues = queues
        self._misses = misses
        self._runs = Runs(pool)
        self._spaces: dict[Space, Listing] = {}
        self._closed: dict[Listing, None] = {}  # of what was forgotten; a part of a tree comes before the rest of it
        self._clock = 0
        self._num_chunks = 0

    def __len__(self) -> int:
        return self._num_chunks

    def held_by(self, tenant: str) -> tuple[int, int]:
        """How many chunks a tenant has, and how many bytes they have."""
        share = self._queues.share(tenant)
        return share.num_chunks, share.used_bytes

    @property
    def dirty(self) -> DirtyChunks:
        """The chunks that are dirty."""
        return self._queues.dirty

    @property
    def sweeping(self) -> bool:
        """Whether `sweep` has something to do."""
        return bool(self._closed)

    def sweep(self, budget_s: float) -> bool:
        """Give back some places of chunks that were forgotten, for about `budget_s`; whether some are left."""
        end = time.monotonic() + budget_s
        while self._closed:
            for _ in range(SWEPT_AT_ONCE):
                self._sweep_one()
            if time.monotonic() >= end:
                break
        return bool(self._closed)

    def find(self, space: Space, key: bytes) -> Chunk | None:
        """The chunk of that key, reserved or committed."""
        listing = self._spaces.get(space)
        return None if listing is None else listing.chunks.get(key)

    def is_elsewhere(self, key: bytes, spaces: Collection[Space]) -> bool:
        """Whether the tenants of `spaces` have a chunk of that key in any other space."""
        tenants = {space.tenant for space in spaces}
        return any(
            key in listing.chunks
            for space, listing in self._spaces.items()
            if space.tenant in tenants and space not in spaces
        )

    def pin(self, last: Chunk, *, use: bool = True) -> None:
        """Use the chain that ends with `last`, which is visible or kept by a pin already, and keep it until `unpin`.

        Without `use` it is only kept: what the server itself does with a chunk makes it no younger.
        """
        assert last.visible or last.pins or last.children, last
        last.pins += 1
        if use:
            self._use(last)

    def unpin(self, last: Chunk, *, use: bool = True) -> None:
        """Undo one `pin` of the same chain; counts as a use, or not, as that did."""
        assert last.pins > 0, last
        last.pins -= 1
        if use:
            self._use(last)
        self._queues.queue(last)
        self._let_go(last)

    def _insert(self, chunk: Chunk) -> Chunk:
        listing = self._spaces.get(chunk.space)
        if listing is None:
            listing = self._spaces[chunk.space] = Listing(chunk.space)
        chunk.listing = listing
        listing.chunks[chunk.key] = chunk
        self._num_chunks += 1
        self._misses.forget(chunk.space, chunk.key)
        self._queues.enter(chunk)
        self._runs.chunks[chunk.offset] = chunk
        if chunk.parent is not None:
            chunk.parent.children.add(chunk)
        return chunk

    def _use(self, chunk: Chunk) -> None:
        self._clock += 1
        chunk.last_use = self._clock
        self._queues.queue(chunk)

    def _forget_tree(self, root: Chunk) -> int:
        """Take a chunk and all below it out of the index; how many were committed.

        Their places are given back but for what a pin needs, and what is its writer's.
        """
        below = root.below() if root.children else [root]
        written = {chunk for chunk in below if chunk.stage is ChunkState.RESERVED}
        for chunk in below:
            self._unlist(chunk)
        for chunk in reversed(below):
            if chunk in written:
                self._detach(chunk)
            else:
                self._release(chunk)
        return len(below) - len(written)

    def _close(self, listing: Listing) -> None:
        """Forget all chunks of a space; `_sweep_one` does the rest."""
        del self._spaces[listing.space]
        self._num_chunks -= len(listing.chunks)
        listing.closed = True
        self._closed[listing] = None

    def _cut(self, root: Chunk) -> int:
        """Forget a chunk and all below it, at some 3 us each; `_sweep_one` does the rest.

        How many were committed.
        """
        listing, cut = root.listing, Listing(root.space)
        assert listing is not None, root
        below = [root]
        for chunk in below:
            # What has been cut off before has a listing of its own.
            below += [each for each in chunk.children if each.listing is listing and each.stage is not ChunkState.GONE]
        for chunk in below:
            del listing.chunks[chunk.key]
            chunk.listing = cut
        cut.chunks = {chunk.key: chunk for chunk in below}
        cut.num_whole = sum(chunk.stage is ChunkState.COMMITTED for chunk in below)
        listing.num_whole -= cut.num_whole
        if not listing.chunks:
            del self._spaces[root.space]
        self._num_chunks -= len(below)
        cut.closed = True
        self._closed[cut] = None
        return cut.num_whole

    def _sweep_one(self, tenant: str | None = None) -> bool:
        """Do for a chunk of a closed listing, of one tenant or of any, what is left to do; whether there was one."""
        listing = next((each for each in self._closed if tenant in (None, each.space.tenant)), None)
        if listing is None:
            return False
        if listing.chunks:
            _, chunk = listing.chunks.popitem()  # the last one: what hangs from it has gone before
            self._forget_tree(chunk)
        if not listing.chunks:
            del self._closed[listing]
            self._queues.tidy(listing.space.tenant)
        return True

    def _unlist(self, chunk: Chunk) -> None:
        listing = chunk.listing
        assert listing is not None, chunk
        listing.num_whole -= chunk.stage is ChunkState.COMMITTED
        chunk.stage, chunk.shown = ChunkState.GONE, False
        self._queues.dirty.remove(chunk)
        listing.chunks.pop(chunk.key, None)  # none where it is being swept
        if not listing.closed:
            self._num_chunks -= 1
            if not listing.chunks:
                del self._spaces[chunk.space]

    def _let_go(self, last: Chunk) -> None:
        """Give back the places of a chain, from its end up, that no lookup can find and no pin needs any more."""
        link: Chunk | None = last
        while link is not None and self._release(link):
            link = link.parent

    def _release(self, chunk: Chunk) -> bool:
        """Give back a place that is not needed any more; whether it was."""
        if chunk.stage is not ChunkState.GONE or chunk.pins or chunk.children:
            return False
        self._detach(chunk)
        self._free(chunk)
        return True

    def _detach(self, chunk: Chunk) -> None:
        parent = chunk.parent
        if parent is not None:
            parent.children.discard(chunk)
            parent.last_use = max(parent.last_use, chunk.last_use)
            self._queues.queue(parent)

    def _free(self, chunk: Chunk) -> None:
        del self._runs.chunks[chunk.offset]
        self._pool.free(chunk.offset)
        self._queues.leave(chunk)
