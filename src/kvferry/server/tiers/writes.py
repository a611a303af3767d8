"""From memory down: what was stored is written to the lower tiers, while its memory is kept for that."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry.cache import Chunk, ChunkIndex, ChunkState, Pool
from kvferry.server.net.rounds import ITEM_S, Budget
from kvferry.server.tiers.disk import DiskSide
from kvferry.server.tiers.queue import name_of
from kvferry.server.tiers.remote import RemoteSide
from kvferry.server.tiers.tasks import Outcome, TierDone

_MAX_TRIES = 3
# Write-back begins when less than this share of the memory is free, or clean and so as good as free.
_CLEAN_SHARE = 0.25
_SLACK = 64
# What a tier did not take, though it was there to be had, is tried again so much later, if memory has it still.
_AGAIN_S = 10.0
_MAX_MISSED = 1 << 16


@dataclass(slots=True, eq=False)
class _DiskWrite:
    """`chunk` of the memory on its way into the file of `below`."""

    chunk: Chunk
    below: Chunk
    num_tries: int = 0


class Writes:
    """Chains on their way to the lower tiers. Belongs to the loop thread.

    A chunk in memory stays dirty until each tier has ended with it: has it, failed, or skipped it. While a tier's
    thread may read it, it is pinned as well, so that its place is kept even where the chunk is forgotten. Chunks of a
    chain are handed over parents first, and go when their parent could not be written.
    """

    def __init__(
        self, memory: ChunkIndex, pool: Pool, *, disk: DiskSide | None, remote: RemoteSide | None, write_back: bool
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._disk = disk
        self._remote = remote
        self._write_back = write_back
        self._waiting: dict[Chunk, None] = {}  # ends of chains, oldest first
        self._writing: dict[Chunk, int] = {}  # to how many tiers
        self._writing_bytes = 0
        self._full: list[_DiskWrite] = []  # those that are tried again once there is room
        self._num_behind = 0
        self._everything = False  # is to be written, also with write-back
        self._missed: dict[Chunk, None] = {}
        self._again_at = 0.0
        self._again: list[Chunk] = []  # what was missed, and is being tried now
        self._num_due = 0  # of those that wait, to be looked at

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    def add(self, shown: Sequence[Chunk]) -> None:
        """Take in dirty chunks that have just become visible, parents first."""
        self._memory.clean(chunk for chunk in shown if self._is_below(chunk))
        self._waiting.update(dict.fromkeys(_ends(shown)))
        if len(self._waiting) > 2 * len(self._memory.dirty) + _SLACK:  # most were forgotten, or written
            ends = (_visible_end(chunk) for chunk in self._waiting)
            self._waiting = {end: None for end in ends if end is not None and end.dirty}
        self.go_on(Budget(ITEM_S))

    def copy_down(self, last: Chunk) -> None:
        """Begin to write a clean chain, that came from a lower tier, to those that lack it, if they can take it now."""
        self._begin(last.chain())

    def tick(self, now: float) -> None:
        """Try again what a tier has missed, if that works by now."""
        disk = self._disk
        if now < self._again_at or (disk is not None and (disk.scanning or not disk.queue.usable)):
            return
        self._again_at = now + _AGAIN_S
        missed, self._missed = self._missed, {}
        self._again += _ends(missed)

    def go_on(self, budget: Budget, *, to_the_end: bool = False) -> None:
        """Begin what it is time for: all that waits, or, with write-back and not `to_the_end`, what has to go."""
        if self._full:
            self._try_again()
        if self._disk is not None and self._disk.scanning and self._disk.queue.usable:
            return
        behind = self._memory.counters.skipped_behind
        self._everything |= to_the_end or not self._write_back or behind != self._num_behind
        self._num_behind = behind
        self._num_due = self._num_due or len(self._waiting)
        budget.spend(self._begin_one)
        budget.spend(self._begin_missed)

    @property
    def more(self) -> bool:
        """Whether `go_on` has more to do, and can."""
        return bool(self._num_due or self._again)

    def _begin_one(self) -> bool:
        limit = (1 - _CLEAN_SHARE) * self._pool.capacity_bytes
        enough = not self._everything and self._memory.dirty.nbytes - self._writing_bytes <= limit
        if enough or not self._num_due or not self._waiting:
            self._num_due = 0
            self._everything = False
            return False
        self._num_due -= 1
        last = next(iter(self._waiting))
        del self._waiting[last]
        end = _visible_end(last)
        if end is not None and not self._begin(end.chain()):
            self._waiting[end] = None
        return True

    def _begin_missed(self) -> bool:
        if self._again:
            end = _visible_end(self._again.pop())
            if end is not None and not self._begin(end.chain()):
                self._miss(end)
        return bool(self._again)

    def _is_below(self, chunk: Chunk) -> bool:
        """Whether all tiers have it, since it was in memory before."""
        below = self._disk is None or self._disk.find(chunk.space, chunk.key) is not None
        return below and (self._remote is None or self._remote.has(name_of(chunk)))

    def _begin(self, chain: Sequence[Chunk]) -> bool:
        """Write what the tiers lack of a chain; whether that could be begun, or need not be."""
        if self._disk is not None and not self._to_disk(self._disk, chain):
            return False
        if self._remote is not None:
            self._to_remote(self._remote, chain)
        self._memory.clean(chunk for chunk in chain if chunk not in self._writing)
        return True

    def _to_disk(self, disk: DiskSide, chain: Sequence[Chunk]) -> bool:
        space, keys = chain[0].space, [chunk.key for chunk in chain]
        if not disk.queue.usable:
            disk.queue.counters.writes_skipped += len(keys) - disk.lookup(space, keys)
            self._miss(chain[-1])
            return True
        if not disk.can_write(name_of(chunk) for chunk in chain):
            return False
        reservation = disk.reserve(space, keys, chain[0].nbytes)
        disk.queue.counters.writes_skipped += reservation.num_skipped
        for chunk, below in zip(chain[reservation.first :], reservation.chunks, strict=False):
            self._hold(chunk)
            self._write(disk, _DiskWrite(chunk, below))
        return True

    def _write(self, disk: DiskSide, write: _DiskWrite) -> None:
        write.num_tries += 1
        disk.queue.write(write.below, write.chunk, functools.partial(self._end_disk, disk, write))

    def _end_disk(self, disk: DiskSide, write: _DiskWrite, done: TierDone) -> None:
        if done.outcome is Outcome.FULL and write.num_tries < _MAX_TRIES:
            disk.measure()
            self._full.append(write)
        elif done.outcome is Outcome.DONE:
            disk.commit(write.below)
            self._let_go(write.chunk)
        else:
            if done.outcome is not Outcome.FULL:
                self._miss(write.chunk)
            self._give_up(disk, write)

    def _try_again(self) -> None:
        """Write what found the disk full, once what could go has gone."""
        disk = self._disk
        if disk is None or not (disk.settled or not disk.queue.usable):
            return
        full, self._full = self._full, []
        for write in full:
            if write.below.state is ChunkState.GONE or not disk.queue.usable:
                disk.queue.counters.writes_skipped += 1
                self._give_up(disk, write)
            else:
                self._write(disk, write)

    def _give_up(self, disk: DiskSide, write: _DiskWrite) -> None:
        disk.abort(write.below)
        self._let_go(write.chunk)

    def _miss(self, last: Chunk) -> None:
        """Remember to try again."""
        self._missed[last] = None
        if len(self._missed) > _MAX_MISSED:
            del self._missed[next(iter(self._missed))]

    def _to_remote(self, remote: RemoteSide, chain: Sequence[Chunk]) -> None:
        missing = [chunk for chunk in chain if not remote.has(name_of(chunk))]
        for number, chunk in enumerate(missing):
            if not remote.can_write(chunk):
                remote.skip(chunk, len(missing) - number)
                if not remote.quotas.knows(chunk.space):
                    self._miss(chain[-1])
                break
            remote.begin_write(chunk)
            self._hold(chunk)
            remote.queue.write(chunk, chunk, functools.partial(self._end_remote, remote, chunk))

    def _end_remote(self, remote: RemoteSide, chunk: Chunk, done: TierDone) -> None:
        name, there = name_of(chunk), self._memory.find(chunk.space, chunk.key)
        well = there is chunk and done.outcome is Outcome.DONE
        remote.end_write(chunk, well=well)
        replaced = there is not None and there is not chunk and there.visible
        if there is not None and replaced and remote.can_write(there):
            self._to_remote(remote, [there])
        elif there is not chunk or (not well and name in remote.late):  # what came there was forgotten meanwhile
            remote.forget(name)
        self._let_go(chunk)

    def _hold(self, chunk: Chunk) -> None:
        if chunk not in self._writing:
            self._memory.pin(chunk, use=False)
            self._writing[chunk] = 0
            self._writing_bytes += chunk.nbytes
        self._writing[chunk] += 1

    def _let_go(self, chunk: Chunk) -> None:
        self._writing[chunk] -= 1
        if not self._writing[chunk]:
            del self._writing[chunk]
            self._writing_bytes -= chunk.nbytes
            self._memory.clean([chunk])
            self._memory.unpin(chunk, use=False)


def _ends(chunks: Collection[Chunk]) -> list[Chunk]:
    """Those of the chunks below which there is none of the others directly."""
    parents = {chunk.parent for chunk in chunks}
    return [chunk for chunk in chunks if chunk not in parents]


def _visible_end(last: Chunk) -> Chunk | None:
    """The last chunk of a chain that was not forgotten."""
    link: Chunk | None = last
    while link is not None and not link.visible:
        link = link.parent
    return link
