"""What the disk tier has, as the loop thread knows it: an index like the memory's, whose chunks are files."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

from kvferry.cache import BytePool, Chunk, ChunkIndex, ChunkState, Reservation, Space
from kvferry.cache.tiers import ChunkName
from kvferry.cache.tiers.disk import StoredChunk
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.server.tier_queue import TierQueue, name_of
from kvferry.server.tier_tasks import Outcome, TierDone, TierScanned

_LOG = logging.getLogger(__name__)

_BLOCK_BYTES = 4096  # file systems give whole ones
_NAMES_A_DELETION = 64
_MEASURE_S = 1.0
_NO_LIMIT = 1 << 63


def file_bytes(nbytes: int) -> int:
    """What a chunk's file takes of a disk."""
    return HEADER_BYTES + -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


class FilePool(BytePool):
    """Counts chunks by what their files take."""

    def fits(self, nbytes: int) -> bool:
        """Whether an empty disk could hold a chunk of `nbytes`."""
        return super().fits(file_bytes(nbytes))

    def allocate(self, nbytes: int) -> int | None:
        """A number for a chunk of `nbytes`, or None where there is no room."""
        return super().allocate(file_bytes(nbytes))


class DiskSide:
    """The index of the disk tier, and what keeps it true: the scan, deletions, how much room there is.

    Belongs to the loop thread. A chunk's file is deleted when the chunk leaves the index, however that came about. What
    is being deleted is not written before that has ended, and nothing is before the scan has (`can_write`).
    """

    def __init__(self, queue: TierQueue, limit_bytes: int) -> None:
        self.queue = queue
        self.pool = FilePool(limit_bytes, self._on_free)
        self.index = ChunkIndex(self.pool)
        self._limit_bytes = limit_bytes
        self._chunks: dict[int, Chunk] = {}  # by the pool's number; that have a file, or may get one
        self._freed: list[Chunk] = []  # whose files are still there
        self._deleting: dict[ChunkName, int] = {}  # with its file's bytes
        self._unwritten_bytes = 0
        self.scanning = False
        self._num_torn = 0
        self._cleared: set[Space | ChunkName] = set()  # since the scan began, which may find them still
        self._measuring = False
        self._measure_at = 0.0

    def start(self) -> None:
        """Begin to find out what is there, and how much room."""
        self.scanning = True
        self.queue.scan()
        self.measure()

    @property
    def settled(self) -> bool:
        """Whether as much room is free as there will be."""
        return not (self.scanning or self._measuring or self._deleting)

    def can_write(self, names: Iterable[ChunkName]) -> bool:
        """Whether files of these names may be written now."""
        return not self.scanning and (not self._deleting or self._deleting.keys().isdisjoint(names))

    def lookup(self, space: Space, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are on disk."""
        last = self.index.lookup(space, keys)
        return 0 if last is None else last.depth

    def find(self, space: Space, key: bytes) -> Chunk | None:
        """The chunk of that key, if it can be read."""
        chunk = self.index.find(space, key)
        return chunk if chunk is not None and chunk.visible else None

    def use(self, space: Space, key: bytes) -> None:
        """The chain that ends with `key` is in use, in memory."""
        chunk = self.find(space, key)
        if chunk is not None:
            self.index.pin(chunk)
            self.index.unpin(chunk)

    def reserve(self, space: Space, keys: Sequence[bytes], nbytes: int) -> Reservation:
        """Take room for those chunks of a chain that are not on disk; each is to be committed or aborted."""
        reservation = self.index.reserve(space, keys, nbytes)
        for chunk in reservation.chunks:
            self._chunks[chunk.offset] = chunk
        self._unwritten_bytes += len(reservation.chunks) * file_bytes(nbytes)
        self._delete_freed()
        return reservation

    def commit(self, chunk: Chunk) -> None:
        """Its file is there."""
        self._unwritten_bytes -= file_bytes(chunk.nbytes)
        self.index.commit([chunk])
        self._delete_freed()

    def abort(self, chunk: Chunk) -> None:
        """Its file was not written; there is none."""
        self._unwritten_bytes -= file_bytes(chunk.nbytes)
        del self._chunks[chunk.offset]
        self.index.abort([chunk])
        self._delete_freed()

    def unpin(self, chunk: Chunk) -> None:
        """Undo a pin of `index`."""
        self.index.unpin(chunk)
        self._delete_freed()

    def discard(self, chunk: Chunk) -> None:
        """Forget a chunk and all below it."""
        self.index.discard(chunk)
        self._delete_freed()

    def clear(self, space: Space, key: bytes | None) -> None:
        """Forget a chunk and all below it, or (with no key) a whole space, found already or not."""
        if self.scanning:
            self._cleared.add(space if key is None else ChunkName(space.digest, key))
        chunk = None if key is None else self.index.find(space, key)
        if key is None:
            self.index.discard_space(space)
        elif chunk is not None:
            self.index.discard(chunk)
        self._delete_freed()

    def tick(self, now: float) -> None:
        """Look after room, and deletions that could not be done."""
        if self.queue.usable:
            self._delete_freed()
            if now >= self._measure_at:
                self._measure_at = now + _MEASURE_S
                self.measure()

    def measure(self) -> None:
        """Find out how much the disk really holds, and keep to that."""
        if not self._measuring:
            self._measuring = True
            self.queue.measure(self._on_measured)

    def on_scanned(self, scanned: TierScanned) -> None:
        """Take in what was found; what cannot be used is deleted."""
        self._num_torn = scanned.num_torn
        limit, self.pool.capacity_bytes = self.pool.capacity_bytes, _NO_LIMIT  # the oldest go at the end, not now
        for stored in scanned.chunks:
            self._take_in(stored)
        self.pool.capacity_bytes = limit
        if scanned.text:
            _LOG.error("the disk tier was not read to its end: %s", scanned.text)
        if scanned.ended:
            self.scanning = False
            self._cleared.clear()
            self.index.trim()
            _LOG.info("the disk tier has %d chunks in %d bytes", len(self.index), self.pool.used_bytes)
        self._delete_freed()

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return {
            **self.queue.values(),
            "disk_chunks": len(self.index),
            "disk_used_bytes": self.pool.used_bytes,
            "disk_capacity_bytes": self.pool.capacity_bytes,
            "disk_evicted": self.index.counters.evicted,
            "disk_torn": self._num_torn,
            "disk_scanning": float(self.scanning),
        }

    def _take_in(self, stored: StoredChunk) -> None:
        meta = stored.meta
        space = Space(meta.tenant, meta.name.namespace)
        chunk = None
        if space not in self._cleared and meta.name not in self._cleared:
            chunk = self.index.restore(space, meta.name.key, meta.parent, meta.nbytes, stored.mtime_ns)
        if chunk is not None:
            self._chunks[chunk.offset] = chunk
        else:  # nothing can be done with it: what it hangs from is gone
            self._freed.append(Chunk(space, meta.name.key, None, 0, meta.nbytes))

    def _on_free(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._freed.append(chunk)

    def _delete_freed(self) -> None:
        """Delete the files of chunks that are in the index no more.

        A chunk that is being written again takes its file over, once it is written.
        """
        if not self._freed or not self.queue.usable:
            return
        gone: dict[ChunkName, Chunk] = {}
        freed, self._freed = self._freed, []
        for chunk in freed:
            there = self.index.find(chunk.space, chunk.key)
            if there is None:
                gone[name_of(chunk)] = chunk
            elif there.state is ChunkState.RESERVED:
                self._freed.append(chunk)
        chunks = [chunk for name, chunk in gone.items() if name not in self._deleting]
        for first in range(0, len(chunks), _NAMES_A_DELETION):
            batch = chunks[first : first + _NAMES_A_DELETION]
            self._deleting.update((name_of(chunk), file_bytes(chunk.nbytes)) for chunk in batch)
            names = tuple(name_of(chunk) for chunk in batch)
            self.queue.delete(names, functools.partial(self._on_deleted, batch))

    def _on_deleted(self, batch: Sequence[Chunk], done: TierDone) -> None:
        for chunk in batch:
            del self._deleting[name_of(chunk)]
        if done.outcome is not Outcome.DONE:
            self._freed += batch

    def _on_measured(self, done: TierDone) -> None:
        self._measuring = False
        if done.outcome is Outcome.DONE and not self.scanning:
            leaving = sum(self._deleting.values()) + sum(file_bytes(chunk.nbytes) for chunk in self._freed)
            room = self.pool.used_bytes - self._unwritten_bytes + leaving + done.value
            self.pool.capacity_bytes = min(self._limit_bytes, room)
            self.index.trim()
            self._delete_freed()
