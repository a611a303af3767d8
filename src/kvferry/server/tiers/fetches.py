"""From the lower tiers up: what a lookup wants and only they have is loaded into memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.cache import Chunk, ChunkIndex, Miss, Pool, Space, slot_bytes
from kvferry.cache.tiers import ChunkName
from kvferry.protocol.messages import KEY_BYTES
from kvferry.server.tiers.disk import DiskSide
from kvferry.server.tiers.queue import TierQueue, name_of
from kvferry.server.tiers.remote import RemoteSide
from kvferry.server.tiers.room import WaitingRoom
from kvferry.server.tiers.tasks import Outcome, TierDone
from kvferry.server.tiers.writes import Writes

MAX_FETCHES = 1024
MAX_KEY_BYTES = 64 << 20  # of all chains that are being loaded
FIND_CHUNKS = 512  # of one question; a longer chain goes on with the next one
# How much of the memory may be waiting for lower tiers, so that stores go on beside it; one fetch alone may have more.
_LOADING_SHARE = 0.5
# Why the chunk will be missed by a lookup; the tier could not be asked where it is none of these.
_MISSES = {Outcome.CORRUPT: Miss.INTEGRITY, Outcome.MISSING: Miss.EVICTED}


class Fetch:
    """The chunks of one chain that are on their way into memory."""

    def __init__(self, space: Space, keys: Sequence[bytes], nbytes: int) -> None:
        self.space = space
        self.keys = keys
        self.nbytes = nbytes
        self.num_loading = 0
        self.num_asked = 0
        self.num_later = 0  # to be asked for once what is loading has come
        self.from_remote: list[Chunk] = []
        self.forgotten = False
        self._callbacks: list[Callable[[], None]] = []
        self._ended = False

    @property
    def coming(self) -> int:
        """How many chunks may still come, at most."""
        return self.num_loading + self.num_asked + self.num_later

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback`, once, when no more will come."""
        if self._ended:
            callback()
        else:
            self._callbacks.append(callback)

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@dataclass(slots=True, eq=False)
class _Load:
    """`chunk` of the memory is being read, from disk where there is `below`; `fetches` want it."""

    chunk: Chunk
    below: Chunk | None
    fetches: list[Fetch] = field(default_factory=list)


class Fetches:
    """All that is being loaded. Belongs to the loop thread.

    A chunk is committed as it comes, and is visible once all before it are; where one does not come, those after it are
    dropped. So whatever happens, memory gets a leading part of the chain, every byte of it checked.
    """

    def __init__(
        self,
        memory: ChunkIndex,
        pool: Pool,
        *,
        disk: DiskSide | None,
        remote: RemoteSide | None,
        writes: Writes,
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._disk = disk
        self._remote = remote
        self._writes = writes
        self._fetches: dict[tuple[Space, bytes], Fetch] = {}  # by the last key
        self._loads: dict[Chunk, _Load] = {}
        self._loading_bytes = 0
        self._places = WaitingRoom(MAX_FETCHES)
        self._key_bytes = WaitingRoom(MAX_KEY_BYTES)
        self.num_cut = 0  # chunks for which memory had no room

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, space: Space, keys: Sequence[bytes], have: int, nbytes: int) -> Fetch | None:
        """Load what lower tiers have of `keys[have:]`, in chunks of `nbytes`; None where they have nothing.

        One fetch at a time for a chain: who asks again gets the one that is going on. None, too, where too much is
        being loaded for all, or for this tenant.
        """
        going_on = self._fetches.get((space, keys[len(keys) - 1]))
        if going_on is not None:
            return going_on
        key_bytes = KEY_BYTES * len(keys)
        if not (self._places.fits(space.tenant, 1) and self._key_bytes.fits(space.tenant, key_bytes)):
            return None
        on_disk = have
        if self._disk is not None and self._disk.queue.usable:
            on_disk = max(have, self._disk.lookup(space, keys))
        fetch = Fetch(space, keys, nbytes)
        if on_disk > have:
            self._load(fetch, on_disk)
        if self._remote is not None and self._remote.queue.usable:
            self._ask(self._remote, fetch, on_disk)
        if not fetch.coming:
            return None
        self._fetches[space, keys[len(keys) - 1]] = fetch
        self._places.enter(space.tenant, 1)
        self._key_bytes.enter(space.tenant, key_bytes)
        return fetch

    def forget(self, space: Space) -> None:
        """What was asked for in this space is not wanted any more; the index drops what is being read."""
        for fetch in self._fetches.values():
            fetch.forgotten |= fetch.space == space

    def _ask(self, remote: RemoteSide, fetch: Fetch, start: int) -> None:
        """Ask for the next few of the chain; more than these come only if all of them do."""
        remote.quotas.look_at(fetch.space)
        end = min(len(fetch.keys), start + FIND_CHUNKS)
        names = remote.may_have(fetch.space.digest, (fetch.keys[place] for place in range(start, end)))
        if names:
            fetch.num_asked = len(names)
            fetch.num_later = len(fetch.keys) - end if start + len(names) == end else 0
            remote.queue.find(names, functools.partial(self._on_found, remote, fetch, start, names))

    def _on_found(
        self, remote: RemoteSide, fetch: Fetch, start: int, names: Sequence[ChunkName], done: TierDone
    ) -> None:
        fetch.num_asked = 0
        if done.outcome is Outcome.DONE and not fetch.forgotten:
            count = max(0, min(done.value, len(names)))
            remote.know(names[:count])
            if count < len(names):
                remote.miss(names[count])
            if count:
                self._load(fetch, start + count)
        self._end_if_done(fetch)

    def _load(self, fetch: Fetch, count: int) -> None:
        """Read what memory lacks of the first `count` chunks, as far as there is room."""
        space, keys = fetch.space, fetch.keys[:count]
        reservation = self._memory.reserve(space, keys, fetch.nbytes, limit=self._chunks_left(fetch.nbytes), quiet=True)
        self.num_cut += reservation.num_skipped
        for key in keys[: reservation.first]:
            chunk = self._memory.find(space, key)
            load = None if chunk is None else self._loads.get(chunk)
            if load is not None and fetch not in load.fetches:
                load.fetches.append(fetch)
                fetch.num_loading += 1
        for number, chunk in enumerate(reservation.chunks):
            if not self._read(fetch, chunk):
                self._memory.abort(reservation.chunks[number:], Miss.TIMED_OUT)
                break

    def _read(self, fetch: Fetch, chunk: Chunk) -> bool:
        """Begin to read a chunk from the first tier that has it; False where none can be asked."""
        disk, remote = self._disk, self._remote
        below = disk.find(chunk.space, chunk.key) if disk is not None and disk.queue.usable else None
        queue: TierQueue
        if disk is not None and below is not None and below.nbytes == chunk.nbytes:
            disk.index.pin(below)
            queue = disk.queue
        elif remote is not None and remote.queue.usable:
            below, queue = None, remote.queue
        else:
            return False
        load = _Load(chunk, below, [fetch])
        self._loads[chunk] = load
        self._loading_bytes += chunk.nbytes
        fetch.num_loading += 1
        queue.read(chunk, functools.partial(self._on_read, load))
        return True

    def _on_read(self, load: _Load, done: TierDone) -> None:
        chunk, well = load.chunk, done.outcome is Outcome.DONE
        del self._loads[chunk]
        self._loading_bytes -= chunk.nbytes
        if well:
            chunk.digest = done.digest
            stored = [each for each in self._memory.commit([chunk]) if each.dirty]
            if stored:  # below it, before it came
                self._writes.add(stored)
        else:
            self._memory.abort([chunk], _MISSES.get(done.outcome, Miss.TIMED_OUT))
        useless = done.outcome in (Outcome.MISSING, Outcome.CORRUPT)
        if load.below is not None:
            self._note_disk(load.below, useless=useless)
        else:
            self._note_remote(load, well=well, useless=useless)
        for fetch in load.fetches:
            fetch.num_loading -= 1
            self._end_if_done(fetch)

    def _note_disk(self, below: Chunk, *, useless: bool) -> None:
        assert self._disk is not None
        if useless:
            self._disk.discard(below)
        self._disk.unpin(below)

    def _note_remote(self, load: _Load, *, well: bool, useless: bool) -> None:
        assert self._remote is not None
        if well:
            load.fetches[0].from_remote.append(load.chunk)
            self._remote.know([name_of(load.chunk)])
        elif useless:
            self._remote.miss(name_of(load.chunk))

    def _end_if_done(self, fetch: Fetch) -> None:
        if fetch.num_loading or fetch.num_asked:
            return
        self._ask_later(fetch)
        if fetch.coming:
            return
        del self._fetches[fetch.space, fetch.keys[len(fetch.keys) - 1]]
        self._places.leave(fetch.space.tenant, 1)
        self._key_bytes.leave(fetch.space.tenant, KEY_BYTES * len(fetch.keys))
        fetch.end()
        last = max((chunk for chunk in fetch.from_remote if chunk.visible), key=lambda chunk: chunk.depth, default=None)
        if last is not None:
            self._writes.copy_down(last)

    def _ask_later(self, fetch: Fetch) -> None:
        """Go on with the chain, if all that was asked for so far has come."""
        start, fetch.num_later = len(fetch.keys) - fetch.num_later, 0
        if start < len(fetch.keys) and self._remote is not None and self._remote.queue.usable and not fetch.forgotten:
            last = self._memory.find(fetch.space, fetch.keys[start - 1])
            if last is not None and last.visible:
                self._ask(self._remote, fetch, start)

    def _chunks_left(self, nbytes: int) -> int | None:
        """How many chunks more may be loaded now."""
        if not self._loading_bytes:
            return None
        room = int(self._pool.capacity_bytes * _LOADING_SHARE) - self._loading_bytes
        return max(0, room // slot_bytes(nbytes))
