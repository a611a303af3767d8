"""The threads of one lower tier: they alone call it. Tasks come in, completions go out."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from kvferry.cache.tiers import Tier
from kvferry.cache.tiers.disk import StoredChunk
from kvferry.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    DeadlineError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
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
    TierCompletion,
    TierDone,
    TierMoved,
    TierScanned,
    TierTask,
    WriteChunk,
)
from kvferry.server.watch.pulse import Pulse
from kvferry.server.watch.transfers import READ, WRITE, Moved

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")

_IDLE_S = 1.0
_SLACK_S = 5.0  # beyond what a tier says that its calls may take
# What somebody waits for comes first, and writes, which nobody waits for, last: after what makes room for them.
_PRIORITIES: dict[type[TierTask], int] = {
    ReadChunk: 0,
    FindChunks: 0,
    MeasureSpace: 0,
    DeleteChunks: 1,
    DeleteNamespace: 1,
    MeasureNamespace: 1,
    ScanTier: 2,
    WriteChunk: 3,
}
_OUTCOMES: tuple[tuple[type[TierError], Outcome], ...] = (
    (ChunkMissingError, Outcome.MISSING),
    (ChunkCorruptError, Outcome.CORRUPT),
    (TierFullError, Outcome.FULL),
    (TierUnavailableError, Outcome.UNAVAILABLE),
    (TierError, Outcome.FAILED),
)


@runtime_checkable
class LocalTier(Protocol):
    """A tier of this server alone, which can say what it has.

    `num_torn` chunks were not whole, and are gone; `num_unlisted` places of chunks could not be looked into by the last
    scan. `num_opened` is how often it took its place.
    """

    num_torn: int
    num_unlisted: int

    @property
    def num_opened(self) -> int: ...

    def scan(self) -> Iterator[Sequence[StoredChunk]]:
        """All chunks that are there, some at a time, parents before children. Raises TierUnavailableError."""

    def free_bytes(self) -> int:
        """How much room is left. Raises TierUnavailableError."""


@runtime_checkable
class SharedTier(Protocol):
    """A tier of which nobody knows all that is in it.

    What goes over many pages calls `on_page` after each; what that raises ends it.
    """

    def delete_namespace(self, namespace: bytes, on_page: Callable[[], None]) -> None:
        """Forget all chunks of a namespace. Raises TierUnavailableError, some of them being forgotten then."""

    def namespace_bytes(self, namespace: bytes, on_page: Callable[[], None]) -> int:
        """How much is in a namespace. Raises TierUnavailableError."""


class TierThreads:
    """Runs a tier's calls in `tier.num_threads` threads of its own, `kvferry-<tier>-<number>`.

    What is queued is bounded by who submits it.

    Parameters
    ----------
    memory_address
        Where the server's memory for chunks begins.
    post
        Takes completions; called in the tier's threads, must not wait.
    """

    def __init__(self, tier: Tier, *, memory_address: int, post: Callable[[TierCompletion], None]) -> None:
        self.tier = tier
        self._memory_address = memory_address
        self._post = post
        call_s: float = getattr(tier, "call_s", 0.0)  # what a call may take, where the tier says so
        self._limit_s = call_s and call_s + _SLACK_S
        self._local = tier if isinstance(tier, LocalTier) else None
        self._scan: Iterator[Sequence[StoredChunk]] | None = None
        self._queues: tuple[deque[TierTask], ...] = tuple(deque() for _ in set(_PRIORITIES.values()))
        self._changed = threading.Condition()
        self._stopping = False
        self.pulses = [Pulse(f"thread {number} of the {tier.name} tier") for number in range(tier.num_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(pulse,), name=f"kvferry-{tier.name}-{number}", daemon=True)
            for number, pulse in enumerate(self.pulses)
        ]

    def __repr__(self) -> str:
        return f"<TierThreads {self.tier.name}: {len(self)} tasks queued>"

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._queues)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, task: TierTask) -> None:
        """Hand over a task, from any thread."""
        with self._changed:
            self._queues[_PRIORITIES[type(task)]].append(task)
            self._changed.notify()

    def withdraw(self, kinds: Collection[type[TierTask]]) -> list[TierTask]:
        """Take back the tasks of these kinds that no thread has begun; they are not answered."""
        taken: list[TierTask] = []
        with self._changed:
            for priority, tasks in enumerate(self._queues):
                if all(kind in kinds for kind, its in _PRIORITIES.items() if its == priority):
                    kept: list[TierTask] = []
                    taken += tasks
                else:
                    taken += [task for task in tasks if type(task) in kinds]
                    kept = [task for task in tasks if type(task) not in kinds]
                tasks.clear()
                tasks.extend(kept)
        return taken

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the threads, each after the call that it is in, and close the tier. What is queued is dropped.

        Raises DeadlineError where a call does not end in time, and may be called again then. Idempotent.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"{thread.name} did not end within {timeout_s:g} s")
        self.tier.close()

    def _run(self, pulse: Pulse) -> None:
        while not self._stopping:
            pulse.beat()
            task = self._take()
            if task is None:
                continue
            with pulse.step(f"{type(task).__name__} of the {self.tier.name} tier", self._limit_s):
                if isinstance(task, ScanTier):
                    self._scan_some(task)
                else:
                    self._post(self._answer(task, functools.partial(self._go_on, pulse)))

    def _go_on(self, pulse: Pulse) -> None:
        """What the thread is in has come a page further. Raises TierUnavailableError at the end of the server."""
        if self._stopping:
            raise TierUnavailableError("the server ends")
        pulse.go_on()
        self._post(TierMoved(self.tier.name))

    def _take(self) -> TierTask | None:
        """The task whose turn it is; None where there is none for a while."""
        with self._changed:
            if not self._stopping and not len(self):
                self._changed.wait(_IDLE_S)
            return None if self._stopping else next((tasks.popleft() for tasks in self._queues if tasks), None)

    def _answer(self, task: AnsweredTask, on_page: Callable[[], None]) -> TierDone:
        began_at = time.monotonic()
        outcome, text, (value, digest) = self._guarded(lambda: self._do(task, on_page), (0, b""))
        moved = _moved(task, time.monotonic() - began_at) if outcome is Outcome.DONE else None
        num_opened = self._local.num_opened if self._local is not None and isinstance(task, MeasureSpace) else 0
        return TierDone(self.tier.name, task.task_id, outcome, text, value, digest, num_opened, moved)

    def _do(self, task: AnsweredTask, on_page: Callable[[], None]) -> tuple[int, bytes]:
        """What the tier says: a number, a checksum."""
        value, digest = 0, b""
        if isinstance(task, WriteChunk):
            self.tier.write(task.meta, self._memory(task.offset, task.meta.nbytes).toreadonly(), task.digest)
        elif isinstance(task, ReadChunk):
            digest = self.tier.read(task.meta, self._memory(task.offset, task.meta.nbytes))
        elif isinstance(task, FindChunks):
            value = self.tier.find(task.names)
        elif isinstance(task, DeleteChunks):
            self.tier.delete(task.names)
        elif isinstance(task, DeleteNamespace):
            assert isinstance(self.tier, SharedTier), self.tier
            self.tier.delete_namespace(task.namespace, on_page)
        elif isinstance(task, MeasureNamespace):
            assert isinstance(self.tier, SharedTier), self.tier
            value = self.tier.namespace_bytes(task.namespace, on_page)
        else:
            assert self._local is not None, self.tier
            value = self._local.free_bytes()
        return value, digest

    def _scan_some(self, task: ScanTier) -> None:
        """One step of the scan; the next one queues again, so that others have their turn."""
        tier = self._local
        assert tier is not None, self.tier
        scan = self._scan = self._scan or tier.scan()
        _, text, chunks = self._guarded(lambda: next(scan, None), None)
        ended = chunks is None
        if ended:
            self._scan = None
        self._post(TierScanned(self.tier.name, tuple(chunks or ()), ended, text, tier.num_torn, tier.num_unlisted))
        if not ended:
            self.submit(task)

    def _guarded(self, call: Callable[[], _T], otherwise: _T) -> tuple[Outcome, str, _T]:
        """What a call of the tier gives, and how it ended: whatever it raises, the thread goes on."""
        try:
            return Outcome.DONE, "", call()
        except TierError as error:
            outcome = next(outcome for kind, outcome in _OUTCOMES if isinstance(error, kind))
            return outcome, str(error), otherwise
        except Exception as error:  # noqa: BLE001 - one chunk fails, the server goes on
            _LOG.exception("the %s tier failed in an unforeseen way", self.tier.name)
            return Outcome.FAILED, f"{type(error).__name__}: {error}", otherwise

    def _memory(self, offset: int, nbytes: int) -> memoryview:
        return memoryview((ctypes.c_char * nbytes).from_address(self._memory_address + offset)).cast("B")


def _moved(task: AnsweredTask, seconds: float) -> Moved | None:
    if isinstance(task, (WriteChunk, ReadChunk)):
        return Moved(WRITE if isinstance(task, WriteChunk) else READ, task.meta.nbytes, seconds)
    return None
