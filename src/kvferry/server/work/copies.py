"""The copies of one device: those whose event is not done yet wait aside, those that are ready take turns.

A turn is that of a cache and a direction, however many jobs it has, so that an engine with many stores holds up neither
its own retrieves nor other engines.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from kvferry.errors import ChunkCorruptError, CopyCancelled, KVFerryError
from kvferry.server.failures import failure_of
from kvferry.server.watch.transfers import READ, WRITE, Moved
from kvferry.server.work.checksums import count_good, digests_of
from kvferry.server.work.device import Device
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.stages import CopyOnItsWay, Run
from kvferry.server.work.tasks import CopyDone, CopyTask, Direction, Failure, StageDone

_LOG = logging.getLogger(__name__)

_FIRST_POLL_S = 0.0001
_LAST_POLL_S = 0.002
_EXPIRE_S = 0.1  # how often the time limits of all that wait are looked at
_CHECKED_BYTES = 64 << 20  # a copy's part with checksums: they take 10 ms, and the other direction waits
_WINDOW = 8  # how many of a turn may be asked at once, those that have waited longest
_CANCELLED = Failure("cancelled", "the job was cancelled; nothing of it is in flight")


class CopyQueue:
    """Belongs to the worker's thread, but for `cancel`, `settle` and `end_cache`, which any thread may call."""

    def __init__(
        self, caches: Mapping[int, OpenedCache], *, memory_address: int, post: Callable[[CopyDone | StageDone], None]
    ) -> None:
        self._caches = caches
        self._memory_address = memory_address
        self._post = post
        self._cancelled: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: dict[tuple[int, Direction], list[CopyOnItsWay]] = {}
        self._expire_at = 0.0
        self._ready: dict[tuple[int, Direction], deque[CopyOnItsWay]] = {}  # the one whose turn it is comes first
        self._running: dict[Direction, Run] = {}  # each of the copy that is ready first in its turn
        self._poll_s = _FIRST_POLL_S

    def cancel(self, job_id: int) -> None:
        """Stop a job soon; its CopyDone still comes."""
        self._cancelled.add(job_id)

    def settle(self, job_id: int) -> None:
        """The job's CopyDone has been seen: forget that it was cancelled."""
        self._cancelled.discard(job_id)

    def end_cache(self, cache_id: int) -> None:
        """Stop all jobs of a cache soon."""
        self._ended.add(cache_id)

    @property
    def wait_s(self) -> float | None:
        """How long the worker may sleep: 0 where a copy is ready, None where there is nothing to do."""
        if self._ready:
            return 0.0
        return self._poll_s if self._waiting else None

    def add(self, task: CopyTask) -> None:
        """Take in a job, or end it at once where it cannot be done."""
        cache = self._caches.get(task.cache_id)
        copy = CopyOnItsWay(task)
        if cache is None:
            self._end(copy, _CANCELLED)
            return
        try:
            copy.begin(cache.plan(task, self._memory_address))
            if task.ticket is not None and cache.events is None:
                raise ValueError("the job waits for an event, but no events were registered")
        except (KVFerryError, ValueError) as error:
            self._end(copy, failure_of(error))
            return
        turn = (task.cache_id, task.direction)
        self._waiting.setdefault(turn, []).append(copy)
        self._poll_s = _FIRST_POLL_S
        self._poll_turn(turn, time.monotonic(), all_limits=False)

    def drop_cache(self, cache_id: int) -> None:
        """End all jobs of a cache; nothing of them is in flight any more."""
        for direction in Direction:
            self._stop((cache_id, direction))
            for copies in (self._waiting, self._ready):
                for copy in copies.pop((cache_id, direction), ()):
                    self._end(copy, _CANCELLED)
        self._ended.discard(cache_id)

    def poll(self) -> None:
        """Ask the events of those that have waited longest.

        An engine may have many jobs behind an event that never comes, and others' copies must not wait for its polls.
        """
        if self._cancelled or self._ended:
            self._end_unbegun()
        if not self._waiting:
            return
        now = time.monotonic()
        all_limits = bool(self._cancelled or self._ended) or now >= self._expire_at
        if all_limits:
            self._expire_at = now + _EXPIRE_S
        for turn in list(self._waiting):
            self._poll_turn(turn, now, all_limits=all_limits)
        self._poll_s = min(self._poll_s * 2, _LAST_POLL_S)

    def _end_unbegun(self) -> None:
        """End what is ready and was cancelled, but for copies that are under way: these end in their next step."""
        for turn, copies in list(self._ready.items()):
            run = self._running.get(turn[1])
            begun = copies[0] if run is not None and run.turn == turn else None
            ended = [copy for copy in copies if copy is not begun and self._is_cancelled(copy)]
            for copy in ended:
                copies.remove(copy)
                self._end(copy, _CANCELLED)
            if not copies:
                del self._ready[turn]

    def _poll_turn(self, turn: tuple[int, Direction], now: float, *, all_limits: bool) -> None:
        """Ask the events of the first in a turn, and look at the time limits of the others, too, with `all_limits`."""
        copies = self._waiting.pop(turn)
        still: list[CopyOnItsWay] = []
        for place, copy in enumerate(copies if all_limits else copies[:_WINDOW]):
            state = self._ask(copy, now) if place < _WINDOW else self._limit(copy, now) or False
            if isinstance(state, Failure):
                self._end(copy, state)
            elif state:
                self._ready.setdefault(turn, deque()).append(copy)
            else:
                still.append(copy)
        still += [] if all_limits else copies[_WINDOW:]
        if still:
            self._waiting[turn] = still

    def step(self, device: Device) -> None:
        """Take one step of a copy in each direction; raises only where the device has failed for good.

        The directions do not wait for each other: while a step of one is being taken, those of the other are under way.
        """
        for direction in Direction:
            run = self._running.get(direction)
            turn = run.turn if run is not None else next((turn for turn in self._ready if turn[1] is direction), None)
            if turn is not None:
                self._advance(turn, device)

    def _advance(self, turn: tuple[int, Direction], device: Device) -> None:
        """Take a step of the copy whose turn it is. It ends, or goes on in its next turn, once its part is done."""
        copies = self._ready[turn]
        copy, failure = copies[0], None
        try:
            if not self._take_step(turn, copy, device):
                return
        except CopyCancelled:
            failure = _CANCELLED
        except Exception as error:
            failure = failure_of(error)
            if device.is_fatal(error) or not isinstance(error, (KVFerryError, MemoryError, ValueError)):
                self._stop(turn)
                self._end(copies.popleft(), failure)
                raise
        self._stop(turn)
        if failure is not None or copy.is_done:
            self._end(copies.popleft(), failure)
        elif not copy.next_chunk:  # a stage is done: who waits for first stages has all of them first
            copies.rotate(-1)
        del self._ready[turn]
        if copies:
            self._ready[turn] = copies

    def _take_step(self, turn: tuple[int, Direction], copy: CopyOnItsWay, device: Device) -> bool:
        """Whether the part that is under way is done, all bytes in place."""
        if self._is_cancelled(copy):
            raise CopyCancelled("cancelled before the step began")
        run = self._running.get(turn[1])
        if run is None:
            run = self._running[turn[1]] = self._begin(turn, copy, device)
        if next(run.steps, None) is not None:
            return False
        copy.seconds += time.monotonic() - run.began_at
        copy.nbytes += (run.stop - copy.next_chunk) * copy.plan.chunks.chunk_bytes
        if turn[1] is Direction.GATHER and copy.task.digests is not None:
            copy.digests += digests_of(run.part)
        copy.next_chunk = run.stop
        if run.damaged:
            copy.damaged = run.stop
            raise ChunkCorruptError("its bytes in memory are not those that were stored: their checksum has changed")
        if copy.end_stage():
            self._post(StageDone(copy.task.cache_id, copy.task.job_id, copy.stage))
        return True

    def _begin(self, turn: tuple[int, Direction], copy: CopyOnItsWay, device: Device) -> Run:
        """The next part of a copy, up to the first chunk whose bytes are not what they were."""
        task, direction = copy.task, turn[1]
        start = copy.next_chunk
        stop = wanted = min(start + self._chunks_a_step(copy, device), len(task.offsets))
        if direction is Direction.SCATTER and task.digests is not None and copy.stage == 0:
            stop = start + count_good(copy.whole.part(start, stop), task.digests[start:stop])
        part = copy.plan.part(start, stop)
        steps = device.copiers[direction].steps(part, to_flat=direction is Direction.GATHER)
        return Run(turn, part, steps, stop, damaged=stop < wanted, began_at=time.monotonic())

    def _stop(self, turn: tuple[int, Direction]) -> None:
        """Nothing of what is under way in this turn is in flight after this."""
        run = self._running.get(turn[1])
        if run is None or run.turn != turn:
            return
        del self._running[turn[1]]
        try:
            run.steps.close()
        except KVFerryError:  # the copies after it meet the same, where the device is lost
            _LOG.exception("the copy that is being ended failed")

    def _chunks_a_step(self, copy: CopyOnItsWay, device: Device) -> int:
        num_chunks = device.step_bytes // copy.plan.chunks.chunk_bytes
        if copy.task.digests is not None and copy.stage == 0:
            num_chunks = min(num_chunks, _CHECKED_BYTES // copy.whole.chunks.chunk_bytes)
        return max(1, num_chunks)

    def _ask(self, copy: CopyOnItsWay, now: float) -> bool | Failure:
        """Whether the copy may begin, or why it ends instead."""
        task = copy.task
        limit = self._limit(copy, now)
        if limit is not None:
            return limit
        if task.ticket is None:
            return True
        events = self._caches[task.cache_id].events
        assert events is not None
        try:
            return events.query(task.ticket)
        except (KVFerryError, ValueError) as error:
            return failure_of(error)

    def _limit(self, copy: CopyOnItsWay, now: float) -> Failure | None:
        """Why the copy ends though its event has not come."""
        if self._is_cancelled(copy):
            return _CANCELLED
        if now >= copy.task.deadline:
            return Failure("deadline", "the engine's work before this job was not done in time; nothing was copied")
        return None

    def _is_cancelled(self, copy: CopyOnItsWay) -> bool:
        return copy.task.job_id in self._cancelled or copy.task.cache_id in self._ended

    def _end(self, copy: CopyOnItsWay, failure: Failure | None) -> None:
        self._cancelled.discard(copy.task.job_id)
        task = copy.task
        direction = WRITE if task.direction is Direction.GATHER else READ
        moved = Moved(direction, copy.nbytes, copy.seconds) if copy.nbytes else None
        digests = tuple(copy.digests)
        self._post(CopyDone(task.cache_id, task.job_id, copy.num_whole, failure, digests, copy.damaged, moved))
