"""Which chunks are kept, what they hang from, and which goes first when room is needed.

A chunk's key stands for all tokens up to its end, so the chunks of a prompt form a chain, and those of many prompts a
tree. Two rules keep every chain whole: a chunk is kept only below a kept parent, and only leaves are evicted, the least
recently used first. A chunk was last used when it or anything below it was, so that a parent is never older than its
child; a leaf hands its time on to its parent when it goes. So a chain is known by its last chunk: to use or to pin that
is to use or to pin all of it, since all others have something below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.cache.chunk import Chunk, ChunkState, IndexCounters, Reservation, Space
from kvferry.cache.eviction import EvictionQueues, Quotas
from kvferry.cache.misses import Miss, MissLog
from kvferry.cache.pool import Pool
from kvferry.cache.tree import SWEPT_AT_ONCE, ChunkTree

_LONG_AGO = 1 << 64  # so long before the start that no clock's time, in ns, comes near it


class ChunkIndex(ChunkTree):
    """The chunks of all spaces in one pool. Not thread-safe: one thread owns it.

    Parameters
    ----------
    pool
        Where the chunks lie; gets each place back once nothing needs it.
    quotas
        How much of it each tenant may hold. At its limit a tenant evicts only its own chunks.
    misses
        Gets a note of each chunk that is not there any more, and why.
    """

    def __init__(self, pool: Pool, *, quotas: Quotas | None = None, misses: MissLog | None = None) -> None:
        super().__init__(pool, EvictionQueues(quotas or Quotas({}), pool.kind), misses or MissLog(0))
        self.counters = IndexCounters()

    def __repr__(self) -> str:
        return f"<ChunkIndex {self._num_chunks} chunks in {len(self._spaces)} spaces>"

    def lookup(self, space: Space, keys: Sequence[bytes], before: int = 0) -> Chunk | None:
        """The last chunk of the longest prefix of `keys` that is all committed. To look is not to use; `pin` is.

        `keys` go on after the first `before` chunks of their chain. A chunk is there only if all before it are, so this
        asks for few of the keys, by halves.
        """
        listing = self._spaces.get(space)
        if listing is None:
            return None
        get = listing.chunks.get
        found: Chunk | None = None
        low, high = 0, len(keys)  # `low` chunks are there
        probe = high  # first the whole prompt, since a prompt that comes again comes often
        while low < high:
            chunk = get(keys[probe - 1])
            if chunk is not None and chunk.shown and chunk.depth == before + probe:
                found, low = chunk, probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return found

    def reserve(
        self,
        space: Space,
        keys: Sequence[bytes],
        nbytes: int,
        start: int = 0,
        *,
        limit: int | None = None,
        quiet: bool = False,
    ) -> Reservation:
        """Take slots for the chunks of `keys[start:]` that are not kept yet.

        `keys` is the chain from its root, or from any chunk that is kept.
        Stops, and counts the rest as skipped, after `limit` slots, where there is no room or where a parent is missing.
        What another store is writing is not written again. If it is `quiet`, nothing is counted: it is no store.
        """
        parent: Chunk | None = None
        held: Chunk | None = None  # must not be evicted for those below it; they themselves cannot be yet
        fresh: list[Chunk] = []
        num_kept = 0
        self._runs.begin()
        for position, key in enumerate(keys):
            chunk = self.find(space, key)
            if chunk is None and position >= start:
                if parent is not None and not fresh:
                    held = parent
                    held.pins += 1
                offset = None if len(fresh) == limit else self._find_place(space.tenant, nbytes)
                if offset is None:
                    if not quiet:
                        self._skip(space, keys[position:], nbytes, is_share=len(fresh) == limit)
                    break
                chunk = self._insert(Chunk(space, key, parent, offset, nbytes))
                fresh.append(chunk)
            elif chunk is None or (position and chunk.parent is not parent) or chunk.nbytes != nbytes:
                self.counters.skipped_orphan += 0 if quiet else len(keys) - max(position, start)
                break
            parent = chunk
            num_kept += 1
        if held is not None:
            held.pins -= 1
            self._queues.queue(held)
        first = num_kept - len(fresh)  # below a fresh chunk all are fresh
        last_there = fresh[0].parent if fresh else parent
        return Reservation(first, tuple(fresh), last_there, max(0, first - start), len(keys) - max(start, num_kept))

    def restore(self, space: Space, key: bytes, parent_key: bytes, nbytes: int, last_use: int) -> Chunk | None:
        """Enter a committed chunk that was found in place; one that is there already stays as it is.

        `last_use` is a time in any unit, and before every use since the start. None where the parent (that of the first
        chunk of a chain has no key) is missing, or where there is no room: nothing is evicted for what is restored.
        """
        there = self.find(space, key)
        if there is not None:
            return there
        parent = self.find(space, parent_key) if parent_key else None
        if parent_key and (parent is None or not parent.visible):
            return None
        offset = self._pool.allocate(nbytes)
        if offset is None:
            return None
        chunk = self._insert(Chunk(space, key, parent, offset, nbytes))
        self._complete(chunk)
        chunk.shown, chunk.last_use = True, last_use - _LONG_AGO
        self._queues.queue(chunk)
        return chunk

    def commit(self, chunks: Sequence[Chunk], *, dirty: bool = False) -> list[Chunk]:
        """Keep chunks of one chain, in its order, whose bytes are whole; all chunks that can be looked up by that.

        Those may be fewer (one waits for its parent, or was forgotten meanwhile and is dropped now) or more (others
        that have waited). With `dirty` they stay until `clean`.
        """
        shown: list[Chunk] = []
        for chunk in chunks:
            if chunk.state is ChunkState.GONE:
                self._free(chunk)
                self.counters.aborted += 1
                continue
            assert chunk.state is ChunkState.RESERVED, chunk
            self._complete(chunk)
            self.counters.committed += 1
            if dirty:
                self._queues.dirty.add(chunk)
            if chunk.parent is None or chunk.parent.visible:
                shown += chunk.show()
            self._use(chunk)
        return shown

    def abort(self, chunks: Sequence[Chunk], reason: Miss = Miss.FAILED) -> None:
        """Drop reserved chunks that will not be written (any more), and all that hangs from them."""
        for chunk in chunks:
            if chunk.state is ChunkState.RESERVED:
                self._misses.note(chunk.space, chunk.key, reason)
                self.counters.aborted += self._forget_tree(chunk)
            self._free(chunk)
            self.counters.aborted += 1

    def clean(self, chunks: Iterable[Chunk]) -> None:
        """The lower tiers have done with these: they may go now. No matter which of them were dirty."""
        for chunk in chunks:
            self._queues.dirty.remove(chunk)
            self._queues.queue(chunk)

    def discard(self, root: Chunk, reason: Miss | None = None) -> int:
        """Forget a chunk and all below it; how many of them were committed.

        What a pin needs keeps its place until the last `unpin`, what is being written until its writer ends. Many
        places are given back by `sweep`, and by stores that need some.
        """
        if root.state is ChunkState.GONE:
            return 0
        num_whole = self._cut(root)
        self.counters.discarded += num_whole
        for _ in range(SWEPT_AT_ONCE):  # mostly all of it
            if not self._sweep_one():
                break
        if reason is not None:
            self._misses.note(root.space, root.key, reason)
        return num_whole

    def discard_space(self, space: Space) -> int:
        """Forget all chunks of a space, as `discard` does."""
        num_whole = self.forget_space(space)
        while self._sweep_one():
            pass
        return num_whole

    def forget_space(self, space: Space) -> int:
        """The same at once, but for the places: `sweep` gives these back, and so does a store that needs some."""
        listing = self._spaces.get(space)
        if listing is None:
            return 0
        self._close(listing)
        self.counters.discarded += listing.num_whole
        return listing.num_whole

    def evict_one(self, tenant: str | None = None) -> bool:
        """Drop the least recently used chunk, of one tenant or of all, that nothing needs; False if there is none."""
        chunk = self._queues.oldest(tenant)
        return chunk is not None and self._evict([chunk])

    def trim(self) -> int:
        """Evict until the pool, and every tenant, is within its limit, as far as that goes; how many went."""
        before = self.counters.evicted
        while self.trim_one():
            pass
        return self.counters.evicted - before

    def trim_one(self) -> bool:
        """One step of `trim`; False where there is none left."""
        for tenant, share in self._queues.shares().items():
            if share.excess() > 0 and (self._sweep_one(tenant) or self.evict_one(tenant)):
                return True
        full = self._pool.used_bytes > self._pool.capacity_bytes
        return full and (self._sweep_one() or self.evict_one())

    def _find_place(self, tenant: str, nbytes: int) -> int | None:
        """A free place, evicting what has to go for it."""
        share = self._queues.share(tenant)
        if not self._pool.fits(nbytes) or not share.fits(nbytes):
            return None
        while share.excess(nbytes) > 0 and (self._sweep_one(tenant) or self.evict_one(tenant)):
            pass
        offset: int | None = None
        if share.excess(nbytes) <= 0:
            offset = self._pool.allocate(nbytes)
            while offset is None and self._make_room(nbytes):
                offset = self._pool.allocate(nbytes)
        return offset

    def _make_room(self, nbytes: int) -> bool:
        """Evict a chunk of the same kind, or a run of others if that was used less recently or is all that can go.

        But what was forgotten first. No chunk goes without making room.
        """
        if self._closed and self._runs.spend():
            return self._sweep_one()
        leaf = self._queues.oldest(kind=self._pool.kind(nbytes))
        run = self._runs.oldest(nbytes, leaf)
        return self._evict(run if run or leaf is None else [leaf])

    def _evict(self, chunks: Sequence[Chunk]) -> bool:
        """Drop these, and so all below them, which is among them; whether there were any."""
        for chunk in chunks:
            if chunk.state is not ChunkState.GONE:
                self._forget_tree(chunk)
            self._misses.note(chunk.space, chunk.key, Miss.EVICTED)
        self.counters.evicted += len(chunks)
        return bool(chunks)

    @staticmethod
    def _complete(chunk: Chunk) -> None:
        assert chunk.listing is not None, chunk
        chunk.stage = ChunkState.COMMITTED
        chunk.listing.num_whole += 1

    def _skip(self, space: Space, keys: Sequence[bytes], nbytes: int, *, is_share: bool) -> None:
        """Count why there is no place for these, and note it for the first: without it the others cannot be there."""
        counters = self.counters
        if is_share:
            counters.skipped_share += len(keys)
        elif self._pool.fits(nbytes) and self._queues.is_behind(space.tenant, nbytes):
            counters.skipped_behind += len(keys)
        elif self._pool.fits(nbytes) and self._queues.share(space.tenant).excess(nbytes) > 0:
            counters.skipped_quota += len(keys)
        else:
            counters.skipped_full += len(keys)
        self._misses.note(space, keys[0], Miss.DROPPED)
