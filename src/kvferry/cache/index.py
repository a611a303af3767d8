"""Which chunks are kept, what they hang from, and which goes first when room is needed.

A chunk's key stands for all tokens up to its end, so the chunks of a prompt form a chain, and those of many prompts a
tree. Two rules keep every chain whole: a chunk is kept only below a kept parent, and eviction takes leaves only. The
order of eviction is by last use; a use moves a whole chain, the root last, so a parent is never older than its child.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cache.pool import SlabPool


class ChunkState(enum.Enum):
    """RESERVED: being written, invisible. COMMITTED: whole. GONE: evicted, aborted, or orphaned."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    GONE = "gone"


class Chunk:
    """One chunk of one rank's KV: where it lies, and its place in the tree. Only `ChunkIndex` changes it."""

    __slots__ = ("children", "key", "namespace", "nbytes", "offset", "parent", "pins", "state")

    def __init__(self, namespace: bytes, key: bytes, parent: Chunk | None, offset: int, nbytes: int) -> None:
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.offset = offset
        self.nbytes = nbytes
        self.children: set[Chunk] = set()
        self.pins = 0
        self.state = ChunkState.RESERVED

    def __repr__(self) -> str:
        return f"<Chunk {self.key[:4].hex()} {self.state.value} pins={self.pins} children={len(self.children)}>"


@dataclass(slots=True)
class IndexCounters:
    """What has happened so far, in chunks."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    aborted: int = 0
    evicted: int = 0
    skipped_full: int = 0
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
        self._order: OrderedDict[Chunk, None] = OrderedDict()  # committed and not pinned, oldest first
        self._num_chunks = 0
        self.counters = IndexCounters()

    def __len__(self) -> int:
        return self._num_chunks

    def __repr__(self) -> str:
        return f"<ChunkIndex {self._num_chunks} chunks in {len(self._namespaces)} namespaces>"

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Chunk]:
        """The longest committed prefix of `keys`; counts as a use of it."""
        found: list[Chunk] = []
        chunks = self._namespaces.get(namespace, {})
        parent: Chunk | None = None
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None or chunk.state is not ChunkState.COMMITTED or chunk.parent is not parent:
                break
            found.append(chunk)
            parent = chunk
        self.counters.hits += len(found)
        self.counters.misses += len(keys) - len(found)
        self._touch(found)
        return found

    def reserve(self, namespace: bytes, keys: Sequence[bytes], nbytes: int, start: int = 0) -> Reservation:
        """Take slots for the chunks of `keys[start:]` that are not kept yet; `keys` is the whole chain from its root.

        Stops, and counts the rest as skipped, where there is no room or where a parent is missing. A chunk that
        another store is writing counts as present.
        """
        walk: list[Chunk] = []
        fresh: list[Chunk] = []
        for position, key in enumerate(keys):
            parent = walk[-1] if walk else None
            chunk = self._get(namespace, key)
            if chunk is None and position >= start:
                chunk = self._insert(namespace, key, parent, nbytes)
                if chunk is None:
                    self.counters.skipped_full += len(keys) - position
                    break
                fresh.append(chunk)
            elif chunk is None or chunk.parent is not parent or chunk.nbytes != nbytes:
                self.counters.skipped_orphan += len(keys) - max(position, start)
                break
            chunk.pins += 1  # so that making room for the next one does not evict this one
            self._order.pop(chunk, None)
            walk.append(chunk)
        self.unpin(walk)
        num_seen = max(start, len(walk))
        first = len(walk) - len(fresh)  # below a fresh chunk all are fresh
        return Reservation(first, tuple(fresh), max(0, first - start), len(keys) - num_seen)

    def commit(self, chunks: Sequence[Chunk]) -> int:
        """Show chunks of one chain, in its order, whose bytes are whole; how many are shown.

        One that was orphaned meanwhile is dropped instead.
        """
        shown: Chunk | None = None
        num_shown = 0
        for chunk in chunks:
            if chunk.state is ChunkState.GONE:
                self._drop(chunk)
                continue
            assert chunk.state is ChunkState.RESERVED, chunk
            chunk.state = ChunkState.COMMITTED
            shown = chunk
            num_shown += 1
        self.counters.committed += num_shown
        if shown is not None:
            self._touch(_chain(shown))
        return num_shown

    def abort(self, chunks: Sequence[Chunk]) -> None:
        """Drop reserved chunks that will not be written (any more), and all that hangs from them."""
        for chunk in chunks:
            if chunk.state is ChunkState.RESERVED:
                self._unlink(chunk)
                self._orphan(chunk)
            self._drop(chunk)

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Keep committed chunks until `unpin`. Pin whole prefixes: a chunk's parents are then pinned with it."""
        for chunk in chunks:
            assert chunk.state is ChunkState.COMMITTED, chunk
            chunk.pins += 1
            self._order.pop(chunk, None)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Undo one `pin` of a prefix (in chain order); counts as a use."""
        for chunk in chunks:
            assert chunk.pins > 0, chunk
            chunk.pins -= 1
        self._touch(chunks)

    def evict_one(self) -> bool:
        """Drop the least recently used chunk that nothing needs; False where there is none."""
        victim = next((chunk for chunk in self._order if not chunk.children), None)
        if victim is None:
            return False
        self._unlink(victim)
        self._pool.free(victim.offset)
        self.counters.evicted += 1
        return True

    def _get(self, namespace: bytes, key: bytes) -> Chunk | None:
        chunks = self._namespaces.get(namespace)
        return None if chunks is None else chunks.get(key)

    def _insert(self, namespace: bytes, key: bytes, parent: Chunk | None, nbytes: int) -> Chunk | None:
        offset = self._pool.allocate(nbytes)
        while offset is None and self._pool.fits(nbytes) and self.evict_one():
            offset = self._pool.allocate(nbytes)
        if offset is None:
            return None
        chunk = Chunk(namespace, key, parent, offset, nbytes)
        self._namespaces.setdefault(namespace, {})[key] = chunk
        self._num_chunks += 1
        if parent is not None:
            parent.children.add(chunk)
        return chunk

    def _touch(self, chain: Sequence[Chunk]) -> None:
        """Make what can be evicted of a prefix the youngest, its root last."""
        order = self._order
        for chunk in reversed(chain):
            if not chunk.pins and chunk.state is ChunkState.COMMITTED:
                order[chunk] = None
                order.move_to_end(chunk)

    def _orphan(self, root: Chunk) -> None:
        """Drop all below an aborted chunk. What is being written keeps its slot until its writer ends it."""
        doomed = [root]
        while doomed:
            chunk = doomed.pop()
            doomed.extend(chunk.children)
            for child in tuple(chunk.children):
                was_whole = child.state is ChunkState.COMMITTED
                self._unlink(child)
                if was_whole:
                    self._drop(child)

    def _unlink(self, chunk: Chunk) -> None:
        """Take a chunk out of the tree; its slot is still taken."""
        chunk.state = ChunkState.GONE
        self._order.pop(chunk, None)
        if chunk.parent is not None:
            chunk.parent.children.discard(chunk)
        chunks = self._namespaces[chunk.namespace]
        del chunks[chunk.key]
        self._num_chunks -= 1
        if not chunks:
            del self._namespaces[chunk.namespace]

    def _drop(self, chunk: Chunk) -> None:
        self._pool.free(chunk.offset)
        self.counters.aborted += 1


def _chain(chunk: Chunk) -> list[Chunk]:
    """The chunk with all that it hangs from, root first."""
    chain: list[Chunk] = []
    link: Chunk | None = chunk
    while link is not None:
        chain.append(link)
        link = link.parent
    chain.reverse()
    return chain
