"""Which chunks are kept, what they hang from, and which goes first when room is needed.

A chunk's key stands for all tokens up to its end, so the chunks of a prompt form a chain, and those of many prompts a
tree. Two rules keep every chain whole: a chunk is kept only below a kept parent, and only leaves are evicted, the least
recently used first. A chunk was last used when it or anything below it was, so that a parent is never older than its
child; a leaf hands its time on to its parent when it goes. So a chain is known by its last chunk: to use or to pin that
is to use or to pin all of it, since all others have something below them.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.pool import SlabPool


class ChunkState(enum.Enum):
    """RESERVED: being written, invisible. COMMITTED: whole. GONE: evicted, aborted, or orphaned."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    GONE = "gone"


class Chunk:
    """One chunk of one rank's KV: where it lies, and its place in the tree. Only `ChunkIndex` changes it.

    `depth` counts the chunks of the chain that ends here; it is `visible` once all of them are committed.
    """

    __slots__ = (
        "children",
        "depth",
        "key",
        "last_use",
        "namespace",
        "nbytes",
        "offset",
        "parent",
        "pins",
        "queued",
        "state",
        "visible",
    )

    def __init__(self, namespace: bytes, key: bytes, parent: Chunk | None, offset: int, nbytes: int) -> None:
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.visible = False
        self.offset = offset
        self.nbytes = nbytes
        self.children: set[Chunk] = set()
        self.pins = 0
        self.last_use = 0
        self.queued = False
        self.state = ChunkState.RESERVED

    def __repr__(self) -> str:
        return f"<Chunk {self.key[:4].hex()} {self.state.value} pins={self.pins} children={len(self.children)}>"

    def chain(self) -> list[Chunk]:
        """All chunks of the chain that ends here, root first."""
        chain: list[Chunk] = []
        link: Chunk | None = self
        while link is not None:
            chain.append(link)
            link = link.parent
        chain.reverse()
        return chain


@dataclass(slots=True)
class IndexCounters:
    """What has happened so far, in chunks."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    aborted: int = 0
    evicted: int = 0
    skipped_full: int = 0
    skipped_share: int = 0
    skipped_orphan: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a store has to write: `chunks[i]` is the chunk at position `first + i` of the prompt."""

    first: int
    chunks: tuple[Chunk, ...]
    num_present: int
    num_skipped: int


class ChunkIndex:
    """The chunks of all namespaces in one pool. Not thread-safe: one thread owns it."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._namespaces: dict[bytes, dict[bytes, Chunk]] = {}
        # Leaves by last use, oldest first; an entry whose chunk has been used, or is no free leaf any more, is stale.
        self._leaves: list[tuple[int, int, Chunk]] = []
        self._clock = 0
        self._num_chunks = 0
        self.counters = IndexCounters()

    def __len__(self) -> int:
        return self._num_chunks

    def __repr__(self) -> str:
        return f"<ChunkIndex {self._num_chunks} chunks in {len(self._namespaces)} namespaces>"

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> Chunk | None:
        """The last chunk of the longest prefix of `keys` that is all committed. To look is not to use; `pin` is.

        A chunk is there only if all before it are, so this asks for few of the keys, by halves.
        """
        get = self._namespaces.get(namespace, {}).get
        found: Chunk | None = None
        low, high = 0, len(keys)  # `low` chunks are there
        probe = high  # first the whole prompt, since a prompt that comes again comes often
        while low < high:
            chunk = get(keys[probe - 1])
            if chunk is not None and chunk.visible and chunk.depth == probe:
                found, low = chunk, probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        self.counters.hits += low
        self.counters.misses += len(keys) - low
        return found

    def reserve(
        self, namespace: bytes, keys: Sequence[bytes], nbytes: int, start: int = 0, *, limit: int | None = None
    ) -> Reservation:
        """Take slots for the chunks of `keys[start:]` that are not kept yet; `keys` is the whole chain from its root.

        Stops, and counts the rest as skipped, after `limit` slots, where there is no room or where a parent is missing.
        A chunk that another store is writing counts as present.
        """
        parent: Chunk | None = None
        fresh: list[Chunk] = []
        num_kept = 0
        empty: dict[bytes, Chunk] = {}
        for position, key in enumerate(keys):
            chunk = self._namespaces.get(namespace, empty).get(key)
            if chunk is None and position >= start:
                if len(fresh) == limit:
                    self.counters.skipped_share += len(keys) - position
                    break
                chunk = self._insert(namespace, key, parent, nbytes)
                if chunk is None:
                    self.counters.skipped_full += len(keys) - position
                    break
                fresh.append(chunk)
            elif chunk is None or chunk.parent is not parent or chunk.nbytes != nbytes:
                self.counters.skipped_orphan += len(keys) - max(position, start)
                break
            parent = chunk
            num_kept += 1
        first = num_kept - len(fresh)  # below a fresh chunk all are fresh
        return Reservation(first, tuple(fresh), max(0, first - start), len(keys) - max(start, num_kept))

    def commit(self, chunks: Sequence[Chunk]) -> int:
        """Show chunks of one chain, in its order, whose bytes are whole; how many are shown.

        One that was orphaned meanwhile is dropped instead.
        """
        num_shown = 0
        for chunk in chunks:
            if chunk.state is ChunkState.GONE:
                self._drop(chunk)
                continue
            assert chunk.state is ChunkState.RESERVED, chunk
            chunk.state = ChunkState.COMMITTED
            if chunk.parent is None or chunk.parent.visible:
                _show(chunk)
            self._use(chunk)
            num_shown += 1
        self.counters.committed += num_shown
        return num_shown

    def abort(self, chunks: Sequence[Chunk]) -> None:
        """Drop reserved chunks that will not be written (any more), and all that hangs from them."""
        for chunk in chunks:
            if chunk.state is ChunkState.RESERVED:
                self._orphan(chunk)
                self._unlink(chunk)
            self._drop(chunk)

    def pin(self, last: Chunk) -> None:
        """Use the chain that ends with `last`, which is visible, and keep all of it until `unpin`."""
        assert last.visible, last
        last.pins += 1
        self._use(last)

    def unpin(self, last: Chunk) -> None:
        """Undo one `pin` of the same chain; counts as a use."""
        assert last.pins > 0, last
        last.pins -= 1
        self._use(last)

    def evict_one(self) -> bool:
        """Drop the least recently used chunk that nothing needs; False where there is none."""
        while self._leaves:
            last_use, _, chunk = heapq.heappop(self._leaves)
            chunk.queued = False
            if last_use == chunk.last_use and self._is_free_leaf(chunk):
                self._unlink(chunk)
                self._pool.free(chunk.offset)
                self.counters.evicted += 1
                return True
            self._queue(chunk)
        return False

    def _insert(self, namespace: bytes, key: bytes, parent: Chunk | None, nbytes: int) -> Chunk | None:
        offset = self._pool.allocate(nbytes)
        if offset is None and self._pool.fits(nbytes):
            offset = self._make_room(nbytes, parent)
        if offset is None:
            return None
        chunk = Chunk(namespace, key, parent, offset, nbytes)
        self._namespaces.setdefault(namespace, {})[key] = chunk
        self._num_chunks += 1
        if parent is not None:
            parent.children.add(chunk)
        return chunk

    def _make_room(self, nbytes: int, keep: Chunk | None) -> int | None:
        """Evict until a slot is free, but not `keep`, under which it is to be used."""
        offset: int | None = None
        if keep is not None:
            keep.pins += 1
        while offset is None and self.evict_one():
            offset = self._pool.allocate(nbytes)
        if keep is not None:
            keep.pins -= 1
            self._queue(keep)
        return offset

    def _use(self, chunk: Chunk) -> None:
        self._clock += 1
        chunk.last_use = self._clock
        self._queue(chunk)

    def _queue(self, chunk: Chunk) -> None:
        """Enter a chunk among the leaves, if it is one and free."""
        if not chunk.queued and self._is_free_leaf(chunk):
            chunk.queued = True
            self._clock += 1
            heapq.heappush(self._leaves, (chunk.last_use, self._clock, chunk))

    @staticmethod
    def _is_free_leaf(chunk: Chunk) -> bool:
        return not chunk.children and not chunk.pins and chunk.state is ChunkState.COMMITTED

    def _orphan(self, root: Chunk) -> None:
        """Drop all below an aborted chunk. What is being written keeps its slot until its writer ends it."""
        below = [root]
        for chunk in below:
            below.extend(chunk.children)
        for chunk in reversed(below[1:]):
            was_whole = chunk.state is ChunkState.COMMITTED
            self._unlink(chunk)
            if was_whole:
                self._drop(chunk)

    def _unlink(self, chunk: Chunk) -> None:
        """Take a leaf out of the tree; its slot is still taken."""
        chunk.state = ChunkState.GONE
        chunk.visible = False
        parent = chunk.parent
        if parent is not None:
            parent.children.discard(chunk)
            parent.last_use = max(parent.last_use, chunk.last_use)
            self._queue(parent)
        chunks = self._namespaces[chunk.namespace]
        del chunks[chunk.key]
        self._num_chunks -= 1
        if not chunks:
            del self._namespaces[chunk.namespace]

    def _drop(self, chunk: Chunk) -> None:
        self._pool.free(chunk.offset)
        self.counters.aborted += 1


def _show(root: Chunk) -> None:
    """Make a committed chunk visible, and what is committed below it."""
    shown = [root]
    for chunk in shown:
        chunk.visible = True
        shown.extend(child for child in chunk.children if child.state is ChunkState.COMMITTED)
