"""What the disk tier has, as the loop thread knows it: an index like the memory's, whose chunks are files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from kvferry.cache import Chunk, ChunkIndex, ChunkState, Quotas, Reservation, Space
from kvferry.cache.tiers import ChunkName
from kvferry.cache.tiers.disk import StoredChunk
from kvferry.server.net.rounds import ITEM_S, Budget
from kvferry.server.tiers.clears import Files, OnGone
from kvferry.server.tiers.cuts import Cut, Cuts
from kvferry.server.tiers.deletions import Deletions
from kvferry.server.tiers.files import FilePool, Search, file_bytes
from kvferry.server.tiers.queue import TierQueue, name_of
from kvferry.server.tiers.tasks import Outcome, TierDone, TierScanned

__all__ = ["DiskSide", "file_bytes"]

_LOG = logging.getLogger(__name__)

_MEASURE_S = 1.0
_NO_LIMIT = 1 << 63
_NO_NUMBER = -1
_STEPS_AT_ONCE = 256  # some 1 ms


class DiskSide:
    """The index of the disk tier, and what keeps it true: the scan, deletions, how much room there is.

    Belongs to the loop thread. A chunk's file is deleted when the chunk leaves the index, however that came about. What
    is being deleted, or still being written for a chunk that was forgotten, is not written before that has ended, and
    nothing is before the scan has (`can_write`). What could not be deleted is tried again, ever more rarely.
    """

    def __init__(self, queue: TierQueue, limit_bytes: int, quotas: Mapping[str, int]) -> None:
        self.queue = queue
        self.pool = FilePool(limit_bytes, self._on_free)
        self.index = ChunkIndex(self.pool, quotas=Quotas(quotas))
        self._limit_bytes = limit_bytes
        self._chunks: dict[int, Chunk] = {}  # by the pool's number; that have a file, or may get one
        self._files = Files()
        self._deletions = Deletions(queue, self.index, self._files)
        self._cuts = Cuts(self.index, self._on_cut)
        self._unwritten: dict[ChunkName, Chunk] = {}
        self._unwritten_bytes = 0
        self._scan = Search()
        self._measure_at: float | None = 0.0  # None while it goes on
        self._now = time.monotonic()
        self._trimming = False

    def start(self) -> None:
        """Begin to find out what is there, and how much room."""
        self._search()
        self.measure()

    def _search(self) -> None:
        self._scan.goes_on = True
        self.queue.scan()

    @property
    def scanning(self) -> bool:
        """Whether what is there is still being found."""
        return self._scan.goes_on

    @property
    def settled(self) -> bool:
        """Whether as much room is free as there will be."""
        return not (self.scanning or self._measure_at is None or self._deletions.going_on or self._forgetting)

    @property
    def leaving(self) -> bool:
        """Whether files are about to be deleted, or to be found for that."""
        return self._deletions.to_come or self._forgetting or (self.scanning and bool(self._scan.cleared))

    @property
    def _forgetting(self) -> bool:
        """Whether some of what was forgotten still takes room."""
        return self.index.sweeping or bool(len(self._cuts))

    def can_write(self, names: Iterable[ChunkName]) -> bool:
        """Whether files of these names may be written now."""
        return not self.scanning and not any(map(self._is_leaving, names))

    def lookup(self, space: Space, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are on disk."""
        last = self.index.lookup(space, keys)
        return 0 if last is None else min(last.depth, self._cuts.limit(space, keys))

    def find(self, space: Space, key: bytes) -> Chunk | None:
        """The chunk of that key, if it can be read."""
        chunk = self.index.find(space, key)
        return chunk if chunk is not None and chunk.visible and not self._cuts.cover(chunk) else None

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
            self._enter(chunk)
            self._unwritten[name_of(chunk)] = chunk
        self._unwritten_bytes += len(reservation.chunks) * file_bytes(nbytes)
        self._deletions.begin()
        return reservation

    def commit(self, chunk: Chunk) -> None:
        """Its file is there."""
        self._unwritten_bytes -= file_bytes(chunk.nbytes)
        del self._unwritten[name_of(chunk)]
        self.index.commit([chunk])
        self._deletions.begin()

    def abort(self, chunk: Chunk) -> None:
        """Its file was not written; there is none."""
        self._unwritten_bytes -= file_bytes(chunk.nbytes)
        del self._chunks[chunk.offset], self._unwritten[name_of(chunk)]
        self.index.abort([chunk])
        self._files.go(chunk)
        self._deletions.begin()

    def unpin(self, chunk: Chunk) -> None:
        """Undo a pin of `index`."""
        self.index.unpin(chunk)
        self._deletions.begin()

    def discard(self, chunk: Chunk) -> None:
        """Forget a chunk and all below it."""
        self._cut(chunk)

    def clear(self, space: Space, key: bytes | None, on_gone: OnGone) -> None:
        """Forget a chunk and all below it, or (with no key) a whole space, found already or not.

        `on_gone` is called once their files are gone, and those that were on their way out before.
        """
        self.hurry()
        chunk = None if key is None else self.index.find(space, key)
        if self.scanning:
            self._scan.cleared.add(space if key is None else ChunkName(space.digest, key))
            self._scan.waits.append((space, key, on_gone))
            on_gone = _nobody_waits
        if key is None:
            self._files.wait(space, None, on_gone)
            self.index.forget_space(space)
            self.index.sweep(ITEM_S)
        elif chunk is not None and chunk.state is not ChunkState.GONE:
            self._cut(chunk, on_gone)
        else:
            self._files.wait(space, self._leaving_of(space), on_gone)
        self._deletions.begin()

    def _cut(self, chunk: Chunk, on_gone: OnGone | None = None) -> None:
        """Forget a chunk and all below it, at once where that is little."""
        if chunk.state is not ChunkState.GONE:
            cut = self._cuts.add(chunk)
            cut.waiting += [] if on_gone is None else [on_gone]
            for _ in range(_STEPS_AT_ONCE):
                if not self._cuts.step():
                    break
        self._deletions.begin()

    def _on_cut(self, cut: Cut) -> None:
        """Nothing of it is in the index any more."""
        if cut.waiting:
            self._deletions.hurry()
            leaving = self._leaving_of(cut.root.space)
            for on_gone in cut.waiting:
                self._files.wait(cut.root.space, leaving, on_gone)

    def hurry(self) -> None:
        """Try again now what could not be deleted."""
        self._deletions.hurry()

    def tick(self, now: float) -> None:
        """Look after room, and deletions that could not be done."""
        self._now = now
        self._deletions.tick(now)
        if self.queue.usable and self._measure_at is not None and now >= self._measure_at:
            self.measure()

    @property
    def more(self) -> bool:
        """Whether `work` has more to do."""
        return self._trimming or bool(len(self._cuts)) or self._deletions.more

    def work(self, budget: Budget) -> None:
        """Go on to keep within the limit, and to delete what is gone."""
        budget.spend(self._cuts.step)
        self._trimming = self._trimming and budget.spend(self.index.trim_one)
        budget.spend(self._deletions.begin)

    def measure(self) -> None:
        """Find out how much the disk really holds, and keep to that."""
        if self._measure_at is not None:
            self._measure_at = None
            self.queue.measure(self._on_measured)

    def on_scanned(self, scanned: TierScanned) -> None:
        """Take in what was found; what cannot be used is deleted."""
        self._scan.num_torn, self._scan.num_unlisted = scanned.num_torn, scanned.num_unlisted
        self.queue.on_scanned(ended=scanned.ended)
        limit, self.pool.capacity_bytes = self.pool.capacity_bytes, _NO_LIMIT  # the oldest go at the end, not now
        for stored in scanned.chunks:
            self._take_in(stored)
        self.pool.capacity_bytes = limit
        if scanned.text:
            _LOG.error("the disk tier was not read to its end: %s", scanned.text)
        if scanned.ended:
            scan, self._scan = self._scan, Search(False, scanned.num_torn, scanned.num_unlisted, self._scan.num_opened)
            for space, key, on_gone in scan.waits:
                cut = None if key is None else self._cuts.get(ChunkName(space.digest, key))
                if cut is not None:
                    cut.waiting.append(on_gone)
                else:
                    self._files.wait(space, None if key is None else self._leaving_of(space), on_gone)
            self._trimming = True
            _LOG.info("the disk tier has %d chunks in %d bytes", len(self.index), self.pool.used_bytes)
        self._deletions.begin()

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return {
            **self.queue.values(),
            "disk_chunks": len(self.index),
            "disk_used_bytes": self.pool.used_bytes,
            "disk_capacity_bytes": self.pool.capacity_bytes,
            "disk_evicted": self.index.counters.evicted,
            "disk_writes_over_quota": self.index.counters.skipped_quota,
            "disk_torn": self._scan.num_torn,
            "disk_unlisted": self._scan.num_unlisted,
            "disk_scanning": float(self.scanning),
            "disk_deleting": len(self._deletions),
        }

    def _take_in(self, stored: StoredChunk) -> None:
        meta = stored.meta
        space = Space(meta.tenant, meta.name.namespace)
        chunk = None
        if self._deletions.want(meta.name):
            return
        if space not in self._scan.cleared and meta.name not in self._scan.cleared:
            chunk = self.index.restore(space, meta.name.key, meta.parent, meta.nbytes, stored.mtime_ns)
        if chunk is None:  # nothing can be done with it: what it hangs from is gone
            chunk = Chunk(space, meta.name.key, None, _NO_NUMBER, meta.nbytes)
            self._files.come(chunk)
            self._deletions.add(chunk)
        elif chunk.offset not in self._chunks:
            self._enter(chunk)

    def _enter(self, chunk: Chunk) -> None:
        self._chunks[chunk.offset] = chunk
        self._files.come(chunk)

    def _is_leaving(self, name: ChunkName) -> bool:
        """Whether a file of that name is about to go, or is being written for a chunk that was forgotten."""
        chunk = self._unwritten.get(name)
        late = chunk is not None and chunk.state is ChunkState.GONE
        return late or name in self._deletions or name in self._cuts

    def _leaving_of(self, space: Space) -> set[Chunk]:
        """What of a space is on its way out."""
        late = (chunk for chunk in self._unwritten.values() if chunk.state is ChunkState.GONE and chunk.space == space)
        return {*self._deletions.of(space), *late}

    def _on_free(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._deletions.add(chunk)

    def _on_measured(self, done: TierDone) -> None:
        self._measure_at = self._now + _MEASURE_S
        if done.num_opened > self._scan.num_opened and not self.scanning and not self.leaving:
            _LOG.info(
                "the disk tier's folder is this server's again: it is searched for what another one has left there"
            )
            self._scan.num_opened = done.num_opened
            self._search()
        if done.outcome is Outcome.DONE and not self.scanning:
            room = self.pool.used_bytes - self._unwritten_bytes + self._deletions.nbytes + done.value
            self.pool.capacity_bytes = min(self._limit_bytes, room)
            self._trimming = True


def _nobody_waits(text: str) -> None:
    """Who waits is told later, once it is known what was there."""
