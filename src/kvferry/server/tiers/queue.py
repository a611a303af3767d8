"""One lower tier as the loop thread sees it: tasks out, answers in, what was counted, and whether to leave it alone."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvferry.cache import Chunk
from kvferry.cache.tiers import ChunkMeta, ChunkName
from kvferry.server.net.rounds import Budget
from kvferry.server.tiers.tasks import (
    AnsweredTask,
    DeleteChunks,
    DeleteNamespace,
    FindChunks,
    MeasureNamespace,
    MeasureSpace,
    Outcome,
    ReadChunk,
    ScanTier,
    TierDone,
    TierTask,
    WriteChunk,
)
from kvferry.server.tiers.threads import TierThreads

_LOG = logging.getLogger(__name__)

_FAILURES_TO_PAUSE = 3
_PAUSE_S = 10.0
# A tier whose threads are all in calls that do not end gives back what only waits in its queue.
_STUCK_S = 30.0

OnEnd = Callable[[TierDone], None]


@dataclass(slots=True)
class TierCounters:
    """What has happened since the start; bytes are those of chunks that came whole."""

    bytes_written: int = 0
    bytes_read: int = 0
    chunks_written: int = 0
    chunks_read: int = 0
    writes_failed: int = 0
    writes_full: int = 0
    writes_skipped: int = 0
    reads_failed: int = 0
    deletes_failed: int = 0
    corrupt: int = 0
    missing: int = 0


def meta_of(chunk: Chunk) -> ChunkMeta:
    """What a tier keeps beside a chunk's bytes."""
    parent = b"" if chunk.parent is None else chunk.parent.key
    return ChunkMeta(name_of(chunk), parent, chunk.depth, chunk.nbytes, chunk.space.tenant)


def name_of(chunk: Chunk) -> ChunkName:
    """A chunk's name in the tiers."""
    return ChunkName(chunk.space.digest, chunk.key)


class TierQueue:
    """Belongs to the loop thread. Every task's `on_end` is called once, there.

    A tier that cannot be reached several times in a row, or does not answer at all, is left alone for a while: what is
    queued then ends as withdrawn, and its owners ask `usable` before they submit more. Time is that of the last `tick`.
    """

    def __init__(self, threads: TierThreads) -> None:
        self.name = threads.tier.name
        self.counters = TierCounters()
        self._threads = threads
        self._ids = itertools.count(1)
        self._tasks: dict[int, tuple[TierTask, OnEnd]] = {}
        self._num_failures = 0
        self._now = self._moved_at = time.monotonic()
        self._paused_until: float | None = None
        self._why_paused = ""
        self._stuck = False
        self._scanning = False
        self._withdrawn: deque[TierTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def usable(self) -> bool:
        """Whether the tier is worth asking at present."""
        return not self._stuck and self._paused_until is None

    @property
    def warning(self) -> str | None:
        """Why it is left alone at present, after failures."""
        if self._paused_until is None:
            return None
        return f"the {self.name} tier is left alone, as it failed several times in a row: {self._why_paused}"

    def stalled(self, now: float, limit_s: float) -> str | None:
        """That there is work, and none of it has ended for so long; None while the tier is paused."""
        waiting = len(self._tasks) + self._scanning
        if not waiting or self._paused_until is not None or now - self._moved_at <= limit_s:
            return None
        return f"the {self.name} tier has ended none of its {waiting} calls for {now - self._moved_at:.1f} s"

    def write(self, chunk: Chunk, source: Chunk, on_end: OnEnd) -> None:
        """Keep what the memory has as `source` as `chunk`."""
        self._submit(WriteChunk(next(self._ids), meta_of(chunk), source.offset, source.digest), on_end)

    def read(self, chunk: Chunk, on_end: OnEnd) -> None:
        """Fill a reserved chunk of the memory."""
        self._submit(ReadChunk(next(self._ids), meta_of(chunk), chunk.offset), on_end)

    def find(self, names: tuple[ChunkName, ...], on_end: OnEnd) -> None:
        """Ask how many of these, from the first on, are there."""
        self._submit(FindChunks(next(self._ids), names), on_end)

    def delete(self, names: tuple[ChunkName, ...], on_end: OnEnd) -> None:
        """Forget these."""
        self._submit(DeleteChunks(next(self._ids), names), on_end)

    def delete_namespace(self, namespace: bytes, on_end: OnEnd) -> None:
        """Forget all of a namespace."""
        self._submit(DeleteNamespace(next(self._ids), namespace), on_end)

    def measure_namespace(self, namespace: bytes, on_end: OnEnd) -> None:
        """Ask how much a namespace has."""
        self._submit(MeasureNamespace(next(self._ids), namespace), on_end)

    def measure(self, on_end: OnEnd) -> None:
        """Ask how much room is left."""
        self._submit(MeasureSpace(next(self._ids)), on_end)

    def scan(self) -> None:
        """Ask what is there; answered by TierScanned."""
        self._note_begin()
        self._scanning = True
        self._threads.submit(ScanTier())

    def on_moved(self) -> None:
        """A task in the tier's threads has ended, or come further."""
        self._moved_at = self._now
        self._stuck = False

    def on_scanned(self, *, ended: bool) -> None:
        """Some of what is there has been told."""
        self.on_moved()
        self._scanning = not ended

    def on_done(self, done: TierDone) -> None:
        """A task has ended in the tier's threads."""
        task, on_end = self._tasks.pop(done.task_id)
        self.on_moved()
        self._count(task, done)
        if isinstance(task, (DeleteChunks, DeleteNamespace)):
            self.counters.deletes_failed += done.outcome is not Outcome.DONE  # says nothing of other calls
        elif isinstance(task, MeasureNamespace):
            pass  # neither does that
        elif done.outcome is Outcome.UNAVAILABLE:
            self._count_failure(done)
        elif isinstance(task, (WriteChunk, ReadChunk, FindChunks)):  # the rest may work where these do not
            self._num_failures = 0
        on_end(done)

    def tick(self, now: float) -> None:
        """Try a paused tier again, if it is time to; give up on what waits for threads that do not come back."""
        self._now = now
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._moved_at = now
        if not self._tasks and not self._scanning:
            self._moved_at = now
            self._stuck = False
        elif now - self._moved_at > _STUCK_S and not self._stuck:
            self._stuck = True
            _LOG.error("the %s tier has not answered for %g s; it is left alone until it does", self.name, _STUCK_S)
            self._withdraw()

    @property
    def more(self) -> bool:
        """Whether `work` has more to do."""
        return bool(self._withdrawn)

    def work(self, budget: Budget) -> None:
        """Go on to end what was withdrawn."""
        budget.spend(self._end_one)

    def values(self) -> dict[str, float]:
        """Counters and gauges by name."""
        values = {**asdict(self.counters), "queue": len(self._tasks), "paused": not self.usable}
        return {f"{self.name}_{name}": float(value) for name, value in values.items()}

    def _submit(self, task: AnsweredTask, on_end: OnEnd) -> None:
        self._note_begin()
        self._tasks[task.task_id] = (task, on_end)
        self._threads.submit(task)

    def _note_begin(self) -> None:
        if not self._tasks and not self._scanning:
            self._moved_at = self._now

    def _count(self, task: TierTask, done: TierDone) -> None:
        counters, well = self.counters, done.outcome is Outcome.DONE
        if isinstance(task, WriteChunk):
            counters.chunks_written += well
            counters.bytes_written += well * task.meta.nbytes
            counters.writes_failed += done.outcome not in (Outcome.DONE, Outcome.FULL)
            counters.writes_full += done.outcome is Outcome.FULL
        elif isinstance(task, ReadChunk):
            counters.chunks_read += well
            counters.bytes_read += well * task.meta.nbytes
            counters.reads_failed += not well
        counters.corrupt += done.outcome is Outcome.CORRUPT
        counters.missing += done.outcome is Outcome.MISSING

    def _count_failure(self, done: TierDone) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            _LOG.warning("the %s tier failed: %s", self.name, done.text)
        if self._num_failures >= _FAILURES_TO_PAUSE and self.usable:
            _LOG.error("the %s tier is left alone for %g s: %s", self.name, _PAUSE_S, done.text)
            self._paused_until, self._why_paused = self._now + _PAUSE_S, done.text
            self._withdraw()

    def _withdraw(self) -> None:
        """Take back all that no thread has begun, but for deletions, which go on where they can; `work` ends it."""
        self._withdrawn.extend(
            self._threads.withdraw((WriteChunk, ReadChunk, FindChunks, MeasureNamespace, MeasureSpace))
        )

    def _end_one(self) -> bool:
        if self._withdrawn:
            task = self._withdrawn.popleft()
            assert not isinstance(task, ScanTier)
            self.counters.writes_skipped += isinstance(task, WriteChunk)
            self.counters.reads_failed += isinstance(task, ReadChunk)
            _, on_end = self._tasks.pop(task.task_id)
            on_end(TierDone(self.name, task.task_id, Outcome.WITHDRAWN, f"the {self.name} tier is left alone"))
        return bool(self._withdrawn)
