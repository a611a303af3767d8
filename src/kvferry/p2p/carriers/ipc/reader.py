"""The copies of the one-sided carrier: bounded steps, each of which looks at its lease and at whether it is wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.copy.pair_copiers import IsDone, PairCopier
from kvferry.copy.pairs import BlockPairs
from kvferry.errors import TransferError
from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.signal.session import Session

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
_POLL_S = 50e-6
_END_S = 30.0

Call = Callable[[], None]


@dataclass(slots=True, eq=False)
class Job:
    """One transfer that is read. `pairs` gives the copy of some of its items; after `until` nothing more is started.

    Items go from `to_come` to `waiting`, once their source is ready, to `copying`, of which `left` is still to start.
    """

    session: Session
    number: int
    pairs: Callable[[list[int]], BlockPairs]
    same_gpu: bool
    until: float
    to_come: set[int]
    waiting: list[int] = field(default_factory=list)
    copying: list[int] = field(default_factory=list)
    left: BlockPairs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What was started; `items` have landed when it is done."""

    job: Job
    done: IsDone
    items: list[int]


class Reader:
    """Runs `kvferry-p2p-ipc-copy`, in which everything but the constructor and `close` happens: methods only queue."""

    def __init__(self, events: CarrierEvents) -> None:
        self._events = events
        self._copier: PairCopier | None = None
        self._jobs: dict[tuple[Session, int], Job] = {}
        self._turns: deque[Job] = deque()  # those that have something to start
        self._steps: deque[_Step] = deque()
        self._stops: list[tuple[Session, int | None, Call]] = []
        self._inbox: deque[Call] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.num_expired = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-ipc-copy", daemon=True)

    def start(self) -> None:
        """Before anything else."""
        self._thread.start()

    def use(self, copier: PairCopier) -> None:
        """Copy with this one from now on, and close the one before."""
        self._queue(lambda: self._use(copier))

    def add(self, job: Job) -> None:
        """A transfer, whose items become ready later."""
        self._queue(lambda: self._jobs.__setitem__((job.session, job.number), job))

    def ready(self, session: Session, number: int, items: Sequence[int]) -> None:
        """Copy these items; nothing happens where the transfer was stopped."""
        self._queue(lambda: self._ready(session, number, items))

    def stop(self, session: Session, number: int, then: Call) -> None:
        """Start nothing more of a transfer; call `then`, in any case, once nothing of it is under way."""
        self._queue(lambda: self._stop(session, number, then))

    def drop(self, session: Session, then: Call) -> None:
        """The same for all transfers of a session."""
        self._queue(lambda: self._stop(session, None, then))

    def close(self) -> None:
        """Start nothing more, wait for what is under way, answer all stops, end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _queue(self, call: Call) -> None:
        with self._changed:
            self._inbox.append(call)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._inbox or self._closing or self._can_start):
                    self._changed.wait(_POLL_S if self._steps else _IDLE_S)
                calls, closing = list(self._inbox), self._closing
                self._inbox.clear()
            for call in calls:
                _guarded(call)
            if closing:
                self._turns.clear()
            self._start_steps()
            self._end_steps()
            self._answer_stops()
            if closing and not (calls or self._steps):
                break
        if self._copier is not None:
            _guarded(self._copier.close)

    @property
    def _can_start(self) -> bool:
        copier = self._copier
        return copier is not None and bool(self._turns) and len(self._steps) < copier.depth

    def _use(self, copier: PairCopier) -> None:
        before, self._copier = self._copier, copier
        if before is not None:
            while self._steps:
                self._end_steps()
            before.close()

    def _ready(self, session: Session, number: int, items: Sequence[int]) -> None:
        job = self._jobs.get((session, number))
        if job is not None:
            fresh = [item for item in dict.fromkeys(items) if item in job.to_come]
            job.waiting.extend(fresh)
            job.to_come.difference_update(fresh)
            if job.waiting and job not in self._turns:
                self._turns.append(job)

    def _stop(self, session: Session, number: int | None, then: Call) -> None:
        for key in [key for key in self._jobs if key[0] == session and number in (None, key[1])]:
            job = self._jobs.pop(key)
            if job in self._turns:
                self._turns.remove(job)
        self._stops.append((session, number, then))

    def _answer_stops(self) -> None:
        busy = [(step.job.session, step.job.number) for step in self._steps]
        waiting = []
        for session, number, then in self._stops:
            if any(session == key[0] and number in (None, key[1]) for key in busy):
                waiting.append((session, number, then))
            else:
                _guarded(then)
        self._stops = waiting

    def _start_steps(self) -> None:
        while self._can_start:
            job = self._turns.popleft()
            if time.monotonic() >= job.until:
                self.num_expired += 1
                _LOG.info("the lease of transfer %d of %r is over: nothing more is read", job.number, job.session)
                continue
            try:
                self._steps.append(self._started(job))
            except Exception as error:  # noqa: BLE001 - whatever it is, the transfer's own session ends by it
                self._failed(job, error)
                continue
            if job.left is not None or job.waiting:
                self._turns.append(job)

    def _started(self, job: Job) -> _Step:
        """Start the next step of a job."""
        copier = self._copier
        assert copier is not None
        if job.left is None:
            job.copying, job.waiting = job.waiting, []
            job.left = job.pairs(job.copying)
        pairs = job.left
        blocks = max(1, copier.step_bytes // pairs.block_bytes)
        done = copier.submit(pairs.part(0, blocks), same_gpu=job.same_gpu)
        rest = pairs.part(blocks, len(pairs.to_ids))
        job.left = rest if len(rest.to_ids) else None
        return _Step(job, done, [] if job.left is not None else job.copying)

    def _end_steps(self) -> None:
        """Tell of what is done; steps end in the order in which they were started."""
        while self._steps:
            step = self._steps[0]
            try:
                if not step.done():
                    return
            except Exception as error:  # noqa: BLE001 - the device is lost, and nothing runs on it any more
                self._failed(step.job, error)
            else:
                self._landed(step.job, step.items)
            self._steps.popleft()

    def _landed(self, job: Job, items: list[int]) -> None:
        self._events.item_landed(job.session, job.number, *items)
        if not (job.to_come or job.waiting or job.left):
            self._jobs.pop((job.session, job.number), None)

    def _failed(self, job: Job, error: Exception) -> None:
        _LOG.error("the copy of transfer %d of %r failed: %s", job.number, job.session, error)
        self._jobs.pop((job.session, job.number), None)
        text = f"a copy between the KV caches failed: {error}"
        self._events.carrier_failed(job.session, TransferError("failed", text))


def _guarded(call: Call) -> None:
    """A mistake in one call must not end the thread that all copies depend on."""
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it is
        _LOG.exception("a call of the copying thread failed")
