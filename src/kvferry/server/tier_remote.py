"""What the remote tier is known to have, in the loop thread: never all of it, since others write there, too."""

from __future__ import annotations

import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvferry.cache import Pool
from kvferry.cache.tiers import ChunkName
from kvferry.server.tier_queue import OnEnd, TierQueue
from kvferry.server.tier_tasks import Outcome, TierDone

_MISS_S = 5.0
_MAX_MISSES = 1 << 14
_MAX_KNOWN = 1 << 17
_NAMES_A_DELETION = 64


class RemoteSide:
    """What is there for sure, what was not there a moment ago, what is on its way. Belongs to the loop thread.

    What waits to be written there may hold up to `share` of the memory's `pool`.
    """

    def __init__(self, queue: TierQueue, pool: Pool, share: float) -> None:
        self.queue = queue
        self._now = time.monotonic()
        self._pool = pool
        self._share = share
        self._backlog_bytes = 0
        self._known: OrderedDict[ChunkName, None] = OrderedDict()  # the one that was used longest ago comes first
        self._misses: OrderedDict[ChunkName, float] = OrderedDict()  # with when to ask again
        self._writing: set[ChunkName] = set()
        self._deleting: Counter[ChunkName | bytes] = Counter()  # chunks, and whole namespaces
        self._undeleted: list[Callable[[], None]] = []

    def has(self, name: ChunkName) -> bool:
        """Whether it is there, or is being written."""
        return name in self._known or name in self._writing

    def may_have(self, names: Sequence[ChunkName]) -> Sequence[ChunkName]:
        """Those of `names`, from the first on, that are worth asking for."""
        count = 0
        for name in names:
            if self._is_deleting(name) or self._misses.get(name, self._now) > self._now:
                break
            count += 1
        return names[:count]

    def can_write(self, name: ChunkName, nbytes: int) -> bool:
        """Whether one more may be written; else it is skipped, since memory is not kept waiting for a slow network."""
        room = self._share * self._pool.capacity_bytes - self._backlog_bytes
        return self.queue.usable and not self._is_deleting(name) and nbytes <= room

    def begin_write(self, name: ChunkName, nbytes: int) -> None:
        """It is on its way."""
        self._writing.add(name)
        self._backlog_bytes += nbytes

    def end_write(self, name: ChunkName, nbytes: int, *, well: bool) -> None:
        """It is there, or was not written."""
        self._writing.discard(name)
        self._backlog_bytes -= nbytes
        if well:
            self.know([name])

    def know(self, names: Iterable[ChunkName]) -> None:
        """These are there."""
        for name in names:
            self._misses.pop(name, None)
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def miss(self, name: ChunkName) -> None:
        """It is not there (any more): do not ask again for a while."""
        self._known.pop(name, None)
        self._misses[name] = self._now + _MISS_S
        self._misses.move_to_end(name)
        while len(self._misses) > _MAX_MISSES:
            self._misses.popitem(last=False)

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Forget these, there as well. They count as gone from now on, and until it is known that they are."""
        for name in names:
            self._known.pop(name, None)
        for first in range(0, len(names), _NAMES_A_DELETION):
            batch = tuple(names[first : first + _NAMES_A_DELETION])
            self._begin(batch, functools.partial(self.queue.delete, batch))

    def delete_namespace(self, namespace: bytes) -> None:
        """Forget all of a namespace, as `delete` does."""
        for name in [name for name in self._known if name.namespace == namespace]:
            del self._known[name]
        self._begin((namespace,), functools.partial(self.queue.delete_namespace, namespace))

    def tick(self, now: float) -> None:
        """Go on with deletions that could not be done."""
        self._now = now
        if self.queue.usable:
            again, self._undeleted = self._undeleted, []
            for begin in again:
                begin()

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        gauges = {"remote_backlog_bytes": self._backlog_bytes, "remote_deleting": sum(self._deleting.values())}
        return {**self.queue.values(), **gauges}

    def _is_deleting(self, name: ChunkName) -> bool:
        return name in self._deleting or name.namespace in self._deleting

    def _begin(self, gone: tuple[ChunkName | bytes, ...], submit: Callable[[OnEnd], None]) -> None:
        self._deleting.update(gone)

        def on_end(done: TierDone) -> None:
            if done.outcome is Outcome.DONE:
                self._deleting.subtract(gone)
                self._deleting += Counter()  # leaves out what is down to 0
            else:
                self._undeleted.append(functools.partial(submit, on_end))

        submit(on_end)
