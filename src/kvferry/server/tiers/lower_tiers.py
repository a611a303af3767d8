"""The tiers below memory, as the rest of the server uses them: what is stored goes down, what is wanted comes up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvferry.cache import Chunk, ChunkIndex, Pool, Space
from kvferry.errors import DeadlineError
from kvferry.server.net.rounds import ITEM_S, TICK_S, Budget
from kvferry.server.tiers.clears import Ending, OnGone
from kvferry.server.tiers.disk import DiskSide
from kvferry.server.tiers.fetches import Fetch, Fetches
from kvferry.server.tiers.queue import TierQueue
from kvferry.server.tiers.remote import RemoteSide
from kvferry.server.tiers.room import TierLimits
from kvferry.server.tiers.tasks import TierDone, TierMoved, TierScanned
from kvferry.server.tiers.threads import TierThreads
from kvferry.server.tiers.writes import Writes
from kvferry.server.watch.pulse import Watched

_LOG = logging.getLogger(__name__)

# How much of the memory may wait for the remote tier; for the disk, which is needed to keep what was stored, all may.
_REMOTE_SHARE = 0.25
_CLEAR_S = 60.0
_MAX_CLEARINGS = 1024
_NO_LIMITS = TierLimits()


class LowerTiers:
    """Belongs to the loop thread, and never waits; the tiers' own threads do. Where there is no tier, nothing happens.

    Parameters
    ----------
    memory, pool
        The chunks in memory, and where they lie.
    disk, remote
        The threads of these tiers, not started yet.
    limits
        How much the tiers may hold.
    write_back
        Write as memory fills up, not at once.
    """

    def __init__(
        self,
        memory: ChunkIndex,
        pool: Pool,
        *,
        disk: TierThreads | None = None,
        limits: TierLimits = _NO_LIMITS,
        remote: TierThreads | None = None,
        write_back: bool = False,
    ) -> None:
        self._threads = [threads for threads in (disk, remote) if threads is not None]
        self._disk = None if disk is None else DiskSide(TierQueue(disk), limits.disk_bytes, limits.disk_quotas)
        quotas = limits.remote_quotas
        self._remote = None if remote is None else RemoteSide(TierQueue(remote), pool, _REMOTE_SHARE, quotas=quotas)
        self._queues = {side.queue.name: side.queue for side in (self._disk, self._remote) if side is not None}
        self._writes = Writes(memory, pool, disk=self._disk, remote=self._remote, write_back=write_back)
        self._fetches = Fetches(memory, pool, disk=self._disk, remote=self._remote, writes=self._writes)
        self._closing = False
        self._clearings: list[Ending] = []
        self._sweeping = False
        self._memory = memory
        self._num_lost = 0
        self._now = time.monotonic()

    @property
    def exist(self) -> bool:
        """Whether there is a tier, so that what is stored is to be committed as dirty, and handed to `on_stored`."""
        return bool(self._threads)

    def start(self) -> None:
        """Start the threads, and begin to find out what is on disk."""
        for threads in self._threads:
            threads.start()
        if self._disk is not None:
            self._disk.start()

    def on_stored(self, shown: Sequence[Chunk]) -> None:
        """These chunks, parents first, can be looked up since a commit, and are dirty."""
        if shown and self.exist:
            self._writes.add(shown)

    def on_used(self, last: Chunk) -> None:
        """The chain in memory that ends with `last` is in use; what is on disk of it counts as used, too."""
        if self._disk is not None:
            self._disk.use(last.space, last.key)

    def fetch(self, space: Space, keys: Sequence[bytes], have: int, nbytes: int) -> Fetch | None:
        """Begin to load what the tiers have of the chain `keys` beyond the first `have` chunks, which memory has.

        A chunk has `nbytes`. None where there is nothing more to come.
        """
        if not self.exist or have >= len(keys):
            return None
        num_cut = self._fetches.num_cut
        fetch = self._fetches.begin(space, keys, have, nbytes)
        if self._fetches.num_cut > num_cut:
            self._writes.go_on(Budget(ITEM_S), to_the_end=True)  # perhaps there was no room because of what is dirty
        return fetch

    def clearing(self, on_end: OnGone) -> Ending:
        """For calls of `clear`, after which its `end` is to be called: `on_end` hears when all of it has gone.

        That is with an empty text once all files and objects are deleted, or with what may come back, and why.
        """
        ending = Ending(on_end, self._now + _CLEAR_S)
        if len(self._clearings) >= _MAX_CLEARINGS:
            ending.end(f"{_MAX_CLEARINGS} calls of clear wait to be answered; whether this one ends well is not told")
        else:
            self._clearings.append(ending)
        return ending

    def clear(self, space: Space, keys: Sequence[bytes] = (), start: int = 0, *, ending: Ending | None = None) -> None:
        """Forget the chain `keys` from position `start` on, and all that hangs from it; with no keys, all of the space.

        The remote tier, where nobody knows what hangs from it, forgets all of the space in any case: else that would be
        found again, old as it is, as soon as the chain is stored anew.
        """
        ending = ending or Ending(lambda text: None, 0.0)
        self._fetches.forget(space)
        if self._disk is not None:
            self._disk.clear(space, keys[start] if keys else None, ending.part())
        if self._remote is not None:
            self._remote.clear(space.digest, ending.part())
        self._end_clearings()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What is done with each kind of item that the tiers' threads post to the loop."""
        return {TierDone: self._on_done, TierMoved: self._on_moved, TierScanned: self._on_scanned}

    def tick(self, now: float) -> None:
        """To be called every second at least: that is how time passes here."""
        self._now = now
        for queue in self._queues.values():
            queue.tick(now)
        if self._disk is not None:
            self._disk.tick(now)
            self._sweeping = self._disk.index.sweep(TICK_S)
        if self._remote is not None:
            self._remote.tick(now)
        self._end_clearings()
        self._writes.tick(now)
        self._go_on(Budget(TICK_S))

    @property
    def more(self) -> bool:
        """Whether there is work left which took too long: `tick` goes on with it, as soon as others had their turn."""
        sides = (side for side in (self._disk, self._writes, *self._queues.values()) if side is not None)
        return self._sweeping or any(side.more for side in sides)

    def flush(self) -> None:
        """Write all that is dirty, and delete what is to go, at once from now on; `idle` says when that has ended."""
        self._closing = True
        for side in (self._disk, self._remote):
            if side is not None:
                side.hurry()
        self._go_on(Budget(TICK_S))

    def tell_left(self) -> None:
        """The server ends: say what is lost by that, as no tier has it."""
        dirty = self._memory.dirty
        if len(dirty):
            self._num_lost += len(dirty)
            _LOG.error(
                "%d chunks in %d bytes were not written to the lower tiers before the end, and are lost",
                len(dirty),
                dirty.nbytes,
                extra={"chunks": len(dirty), "bytes": dirty.nbytes},
            )
        if any(side.leaving for side in (self._disk, self._remote) if side is not None):
            _LOG.error("not all that was to be deleted in the lower tiers has been, before the end: it may come back")

    @property
    def idle(self) -> bool:
        """Whether nothing is to be written, or deleted, but for what could not be."""
        sides = (side for side in (self._disk, self._remote) if side is not None)
        return not len(self._writes) and not any(side.leaving for side in sides)

    def pulses(self, *, remote: bool) -> Iterator[Watched]:
        """What has to move of the remote tier, or of the others: threads, and the work that the disk has to do."""
        for threads in self._threads:
            if (threads.tier.name == "remote") == remote:
                yield from threads.pulses
        if self._disk is not None and not remote:
            yield self._disk.queue

    def warnings(self) -> Iterator[str]:
        """Which tiers are left alone at present, and why."""
        return (queue.warning for queue in self._queues.values() if queue.warning is not None)

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        sides = (side for side in (self._disk, self._remote) if side is not None)
        values = {name: value for side in sides for name, value in side.values().items()}
        values["writes_lost"] = self._num_lost
        return (
            {
                **values,
                "fetches": len(self._fetches),
                "loads_cut": self._fetches.num_cut,
                "writes": len(self._writes),
            }
            if self.exist
            else {}
        )

    def values_of(self, tenant: str) -> dict[str, float]:
        """What a tenant has there, as far as that is known."""
        if self._disk is None:
            return {}
        num_chunks, nbytes = self._disk.index.held_by(tenant)
        return {"disk_chunks": num_chunks, "disk_used_bytes": nbytes}

    def stop(self, timeout_s: float) -> list[DeadlineError]:
        """End all threads, once the loop does not run any more; those that did not end in time, to be stopped again."""
        late: list[DeadlineError] = []
        for threads in self._threads:
            try:
                threads.stop(timeout_s)
            except DeadlineError as error:
                late.append(error)
        return late

    def _end_clearings(self) -> None:
        """Answer for what cannot be deleted at present, or takes too long."""
        away = [queue.name for queue in self._queues.values() if not queue.usable]
        for ending in self._clearings:
            if away:
                ending.end(f"the {away[0]} tier is left alone at present, after failures")
            elif self._now >= ending.deadline:
                ending.end(f"the lower tiers have not deleted it within {_CLEAR_S:g} s")
        self._clearings = [ending for ending in self._clearings if not ending.ended]

    def _on_done(self, done: TierDone) -> None:
        self._queues[done.tier].on_done(done)
        self._go_on(Budget(ITEM_S))

    def _on_moved(self, moved: TierMoved) -> None:
        self._queues[moved.tier].on_moved()

    def _on_scanned(self, scanned: TierScanned) -> None:
        assert self._disk is not None
        self._disk.on_scanned(scanned)
        self._go_on(Budget(ITEM_S))

    def _go_on(self, budget: Budget) -> None:
        for queue in self._queues.values():
            queue.work(budget)
        if self._disk is not None:
            self._disk.work(budget)
        self._writes.go_on(budget, to_the_end=self._closing)
