"""What the remote tier is known to have, in the loop thread: never all of it, since others write there, too."""

from __future__ import annotations

import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from kvferry.cache import Chunk, Pool
from kvferry.cache.tiers import ChunkName
from kvferry.server.tiers.bucket_quotas import BucketQuotas
from kvferry.server.tiers.clears import Ending, OnGone, Undeleted
from kvferry.server.tiers.queue import TierQueue, name_of
from kvferry.server.tiers.tasks import Outcome, TierDone

_MISS_S = 5.0
_MAX_MISSES = 1 << 14
_MAX_KNOWN = 1 << 17
_MAX_UNDELETED = 1024

Gone = tuple[ChunkName | bytes, ...]  # chunks, or one whole namespace


class RemoteSide:
    """What is there for sure, what was not there a moment ago, what is on its way. Belongs to the loop thread.

    What waits to be written there may hold up to `share` of the memory's `pool`.
    """

    def __init__(self, queue: TierQueue, pool: Pool, share: float, *, quotas: Mapping[str, int]) -> None:
        self.queue = queue
        self.quotas = BucketQuotas(queue, quotas)
        self._now = time.monotonic()
        self._pool = pool
        self._share = share
        self._backlog_bytes = 0
        # With how often its namespace was deleted before; the one that was used longest ago comes first.
        self._known: OrderedDict[ChunkName, int] = OrderedDict()
        self._num_deleted: Counter[bytes] = Counter()  # how often each namespace was
        self._misses: OrderedDict[ChunkName, float] = OrderedDict()  # with when to ask again
        self._writing: set[ChunkName] = set()
        self._deleting: Counter[ChunkName | bytes] = Counter()  # chunks, and whole namespaces
        self._undeleted: Undeleted[Gone, Gone] = Undeleted("remote")
        self.late: dict[ChunkName, list[OnGone]] = {}  # being written since before a clear, with who waits

    def has(self, name: ChunkName) -> bool:
        """Whether it is there, or is being written."""
        return name in self._writing or self._known.get(name) == self._num_deleted[name.namespace]

    def may_have(self, namespace: bytes, keys: Iterable[bytes]) -> tuple[ChunkName, ...]:
        """The chunks of a namespace, from the first one on, that are worth asking for."""
        names: list[ChunkName] = []
        for key in keys:
            name = ChunkName(namespace, key)
            if self._is_deleting(name) or self._misses.get(name, self._now) > self._now:
                break
            names.append(name)
        return tuple(names)

    def can_write(self, chunk: Chunk) -> bool:
        """Whether one more may be written; else it is skipped, since memory is not kept waiting for a slow network."""
        room = self._share * self._pool.capacity_bytes - self._backlog_bytes
        there = self.queue.usable and not self._is_deleting(name_of(chunk)) and chunk.nbytes <= room
        return there and self.quotas.fits(chunk.space, chunk.nbytes)

    def skip(self, chunk: Chunk, count: int) -> None:
        """It, and so many with it, cannot be written."""
        self.queue.counters.writes_skipped += count
        self.quotas.num_skipped += 0 if self.quotas.fits(chunk.space, chunk.nbytes) else count

    def begin_write(self, chunk: Chunk) -> None:
        """It is on its way."""
        self._writing.add(name_of(chunk))
        self._backlog_bytes += chunk.nbytes
        self.quotas.begin_write(chunk.space, chunk.nbytes)

    def end_write(self, chunk: Chunk, *, well: bool) -> None:
        """It is there, or was not written."""
        name = name_of(chunk)
        self._writing.discard(name)
        self._backlog_bytes -= chunk.nbytes
        self.quotas.end_write(chunk.space, chunk.nbytes, well=well)
        if well:
            self.know([name])
            for on_gone in self.late.pop(name, ()):  # what was there before is overwritten
                on_gone("")

    def know(self, names: Iterable[ChunkName]) -> None:
        """These are there."""
        for name in names:
            self._misses.pop(name, None)
            self._known[name] = self._num_deleted[name.namespace]
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

    def forget(self, name: ChunkName) -> None:
        """What came there under this name was forgotten meanwhile: delete it."""
        waiting = self.late.pop(name, ())

        def on_gone(text: str) -> None:
            for each in waiting:
                each(text)

        self._known.pop(name, None)
        self._delete((name,), on_gone)

    def clear(self, namespace: bytes, on_gone: OnGone) -> None:
        """Forget all of a namespace, there as well, and what of it is on its way there.

        It counts as gone from now on, and is neither read nor written until it is; then `on_gone` is called.
        """
        self._num_deleted[namespace] += 1
        ending = Ending(on_gone, 0.0)
        for name in self._writing:
            if name.namespace == namespace:
                self.late.setdefault(name, []).append(ending.part())
        self._delete((namespace,), ending.part())
        ending.end()

    def hurry(self) -> None:
        """Try again now what could not be deleted."""
        self._undeleted.hurry()
        self._try_again()

    @property
    def leaving(self) -> bool:
        """Whether something is being deleted, or about to be."""
        return sum(self._deleting.values()) > sum(map(len, self._undeleted.values()))

    def tick(self, now: float) -> None:
        """Go on with deletions that could not be done."""
        self._now = now
        self._undeleted.tick(now)
        self._try_again()
        self.quotas.tick(now)

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return {
            **self.queue.values(),
            "remote_writes_over_quota": self.quotas.num_skipped,
            "remote_backlog_bytes": self._backlog_bytes,
            "remote_deleting": sum(self._deleting.values()),
        }

    def _is_deleting(self, name: ChunkName) -> bool:
        return name in self._deleting or name.namespace in self._deleting

    def _delete(self, gone: Gone, on_gone: OnGone) -> None:
        self._deleting.update(gone)
        self._submit(gone, on_gone)

    def _submit(self, gone: Gone, on_gone: OnGone) -> None:
        on_end = functools.partial(self._on_deleted, gone, on_gone)
        names = tuple(name for name in gone if isinstance(name, ChunkName))
        if names:
            self.queue.delete(names, on_end)
        else:
            (namespace,) = gone
            assert isinstance(namespace, bytes), gone
            self.queue.delete_namespace(namespace, on_end)

    def _on_deleted(self, gone: Gone, on_gone: OnGone, done: TierDone) -> None:
        if done.outcome is Outcome.DONE:
            self._end_deletion(gone)
            for namespace in gone:
                if isinstance(namespace, bytes):
                    self.quotas.forget(namespace)
            on_gone("")
            return
        if len(self._undeleted) >= _MAX_UNDELETED and isinstance(gone[0], ChunkName):  # fewer, but larger ones
            self._end_deletion(gone)
            gone = (gone[0].namespace,)
            self._deleting.update(gone)
        replaced = self._undeleted.add(gone, gone, done.text)
        if replaced is not None:
            self._end_deletion(replaced)
        on_gone(done.text)

    def _end_deletion(self, gone: Gone) -> None:
        self._deleting.subtract(gone)
        self._deleting += Counter()  # leaves out what is down to 0

    def _try_again(self) -> None:
        if self.queue.usable:
            for gone in self._undeleted.take(busy=bool(self._deleting)):
                self._submit(gone, _nobody_waits)


def _nobody_waits(text: str) -> None:
    """What is tried again has been answered for."""
