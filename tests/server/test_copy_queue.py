"""The queue of copies: who is asked for events, in which order copies begin, that both directions go on at once."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry.copy import Steps
from kvferry.ipc.events import Ticket
from kvferry.server.work.copies import CopyQueue
from kvferry.server.work.device import Device
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import CopyDone, CopyTask, Direction, StageDone


class Events:
    """Events that are done when a test says so; counts who asks."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.num_asked = 0

    def query(self, ticket: Ticket) -> bool:
        self.num_asked += 1
        return ticket.value in self.done


class Plan:
    """Of one job, or a part of it; chunks have six planes."""

    skips = False

    def __init__(self, job: int, num_chunks: int = 0, *, chunk_bytes: int = 64, stage: int | None = None) -> None:
        self.job = job
        self.stage_number = stage
        self.flats = np.zeros(num_chunks, dtype=np.int64)
        self.chunks = SimpleNamespace(chunk_bytes=chunk_bytes, planes=np.zeros((4, 6)))

    def part(self, start: int, stop: int) -> Plan:
        return Plan(self.job, stop - start, chunk_bytes=self.chunks.chunk_bytes, stage=self.stage_number)

    def stage(self, number: int, of: int) -> Plan:
        return Plan(self.job, len(self.flats), chunk_bytes=self.chunks.chunk_bytes // of, stage=number)


class Cache:
    """An open cache of which nothing is copied."""

    layout = SimpleNamespace(block_bytes=64)

    def __init__(self) -> None:
        self.events: Events = Events()

    def plan(self, task: CopyTask, pool_address: int) -> Plan:
        return Plan(task.job_id, chunk_bytes=self.layout.block_bytes)


class Notes:
    """A device whose copies have four steps, of which it keeps a list."""

    step_bytes = 1 << 30

    def __init__(self) -> None:
        self.steps_taken: list[int] = []  # by job
        self.stages_taken: list[int | None] = []
        self.in_flight: set[int] = set()
        self.copiers = dict.fromkeys(Direction, self)

    def steps(self, plan: Plan, *, to_flat: bool) -> Steps:
        self.in_flight.add(plan.job)
        try:
            for number in range(4):
                yield number
                self.steps_taken.append(plan.job)
                self.stages_taken.append(plan.stage_number)
        finally:
            self.in_flight.discard(plan.job)

    def is_fatal(self, error: Exception) -> bool:
        return False

    @property
    def begun(self) -> list[int]:
        return list(dict.fromkeys(self.steps_taken))


class Copies(CopyQueue):
    """With one cache, and a device that only takes notes."""

    def __init__(self, cache: Cache) -> None:
        self.done: list[CopyDone] = []
        self.stages: list[tuple[int, int]] = []  # that are done, and of which job
        super().__init__({1: cast(OpenedCache, cache)}, memory_address=0, post=self._take)
        self.device = Notes()

    def take_step(self) -> None:
        self.step(cast(Device, self.device))

    def _take(self, completion: CopyDone | StageDone) -> None:
        if isinstance(completion, StageDone):
            self.stages.append((completion.job_id, completion.stages))
        else:
            self.done.append(completion)


def task(job: int, timeout_s: float = 60.0, direction: Direction = Direction.GATHER) -> CopyTask:
    return CopyTask(
        cache_id=1,
        job_id=job,
        direction=direction,
        block_ids=bytes(4),
        offsets=(0,),
        skip_blocks=0,
        ticket=Ticket(0, job),
        deadline=time.monotonic() + timeout_s,
    )


def test_many_jobs_behind_an_event_that_does_not_come_cost_few_questions() -> None:
    cache = Cache()
    copies = Copies(cache)
    for job in range(1, 501):
        copies.add(task(job))
    cache.events.num_asked = 0
    for _ in range(10):
        copies.poll()
    assert cache.events.num_asked <= 100


def test_jobs_of_one_turn_begin_in_order_and_all_of_them() -> None:
    cache = Cache()
    copies = Copies(cache)
    for job in range(1, 51):
        copies.add(task(job))
    cache.events.done.update(range(1, 51))
    while copies.wait_s is not None:
        copies.poll()
        copies.take_step()
    assert copies.device.begun == list(range(1, 51))
    assert [done.failure for done in copies.done] == [None] * 50


def test_time_limits_and_cancels_reach_those_far_behind() -> None:
    copies = Copies(Cache())
    for job in range(1, 51):
        copies.add(task(job))
    copies.add(task(51, timeout_s=0.0))
    copies.cancel(40)
    copies.poll()
    ended = {done.job_id: done.failure.code for done in copies.done if done.failure is not None}
    assert ended == {40: "cancelled", 51: "deadline"}


def test_events_that_come_out_of_order_let_their_jobs_begin() -> None:
    cache = Cache()
    copies = Copies(cache)
    for job in range(1, 5):
        copies.add(task(job))
    cache.events.done.add(3)
    copies.poll()
    copies.take_step()
    copies.take_step()
    assert copies.device.begun == [3]


def started(*tasks: CopyTask) -> Copies:
    """All of them ready, and one step taken in each direction."""
    cache = Cache()
    copies = Copies(cache)
    cache.events.done.update(each.job_id for each in tasks)
    for each in tasks:
        copies.add(each)
    copies.take_step()
    copies.take_step()
    return copies


def test_a_retrieve_does_not_wait_for_the_store_that_is_under_way() -> None:
    copies = started(task(1))
    copies._caches[1].events.done.add(2)  # type: ignore[union-attr]
    copies.add(task(2, direction=Direction.SCATTER))
    for _ in range(3):
        copies.take_step()
    assert copies.device.steps_taken == [1, 1, 1, 2, 1, 2]
    assert copies.device.in_flight == {2}
    while copies.wait_s is not None:
        copies.take_step()
    assert [(done.job_id, done.failure) for done in copies.done] == [(1, None), (2, None)]


def test_a_cancelled_copy_ends_between_its_steps_with_nothing_in_flight() -> None:
    copies = started(task(1), task(2))
    copies.cancel(1)
    copies.take_step()
    assert copies.device.in_flight == set()
    assert [(done.job_id, done.failure and done.failure.code) for done in copies.done] == [(1, "cancelled")]
    while copies.wait_s is not None:
        copies.take_step()
    assert copies.device.steps_taken == [1, 2, 2, 2, 2]


def test_a_cancelled_copy_that_is_ready_does_not_wait_for_its_turn() -> None:
    copies = started(task(1), task(2), task(3))
    copies.cancel(2)
    copies.poll()
    assert [(done.job_id, done.failure and done.failure.code) for done in copies.done] == [(2, "cancelled")]
    assert copies.device.in_flight == {1}
    while copies.wait_s is not None:
        copies.poll()
        copies.take_step()
    assert copies.device.steps_taken == [1, 1, 1, 1, 3, 3, 3, 3]


def test_what_is_ready_of_a_cache_that_ends_is_ended_all_of_it() -> None:
    copies = started()
    cache = cast(Cache, copies._caches[1])
    cache.events.done.update((1, 2))
    copies.add(task(1))
    copies.add(task(2, direction=Direction.SCATTER))
    copies.end_cache(1)
    copies.poll()
    assert [done.job_id for done in copies.done] == [1, 2]
    assert copies.wait_s is None


def test_a_cache_is_dropped_with_nothing_in_flight() -> None:
    copies = started(task(1), task(2), task(3, direction=Direction.SCATTER))
    assert copies.device.in_flight == {1, 3}
    copies.drop_cache(1)
    assert copies.device.in_flight == set()
    assert sorted(done.job_id for done in copies.done) == [1, 2, 3]
    assert {done.failure and done.failure.code for done in copies.done} == {"cancelled"}
    assert copies.wait_s is None


@pytest.mark.parametrize(("digests", "num_parts"), [(None, 1), ((b"",) * 5, 3)])
def test_checksums_do_not_hold_up_the_other_direction_for_long(
    digests: tuple[bytes, ...] | None, num_parts: int
) -> None:
    """Five chunks of 32 MiB: one part of a copy, unless the processor has to read each part first."""
    copies = big_copy(digests=digests)
    while copies.wait_s is not None:
        copies.take_step()
    assert [(each.num_chunks, each.failure) for each in copies.done] == [(5, None)]
    assert len(copies.device.steps_taken) == 4 * num_parts


def big_copy(**changes: Any) -> Copies:
    """Job 1, five chunks of 32 MiB, ready to be scattered."""
    cache = Cache()
    cache.layout = SimpleNamespace(block_bytes=32 << 20)
    cache.events.done.add(1)
    copies = Copies(cache)
    job = task(1, direction=Direction.SCATTER)
    copies.add(replace(job, block_ids=bytes(20), offsets=(0,) * 5, **changes))
    return copies


def test_stages_come_one_after_the_other_and_are_told() -> None:
    copies = big_copy(stages=3)
    copies.device.step_bytes = 32 << 20  # three chunks of a stage
    while copies.wait_s is not None:
        copies.take_step()
    assert copies.stages == [(1, 1), (1, 2)]
    assert [(each.num_chunks, each.failure) for each in copies.done] == [(5, None)]
    assert copies.device.stages_taken == [number for number in range(3) for _ in range(2 * 4)]
    assert copies.done[0].moved is not None
    assert copies.done[0].moved.nbytes == 5 * 3 * ((32 << 20) // 3)


def test_checksums_are_looked_at_once_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int | None, int]] = []

    def count_good(part: Plan, digests: tuple[bytes, ...]) -> int:
        looked_at.append((part.stage_number, len(digests)))
        return len(digests)

    monkeypatch.setattr("kvferry.server.work.copies.count_good", count_good)
    copies = big_copy(stages=3, digests=(b"",) * 5)
    while copies.wait_s is not None:
        copies.take_step()
    assert copies.device.stages_taken == [0] * 4 * 3 + [1] * 4 + [2] * 4
    assert looked_at == [(None, 2), (None, 2), (None, 1)]  # of whole chunks


def test_there_are_no_more_stages_than_planes() -> None:
    copies = big_copy(stages=256)
    while copies.wait_s is not None:
        copies.take_step()
    assert copies.stages == [(1, number) for number in range(1, 6)]


@pytest.mark.parametrize("end", ["cancel", "end_cache"])
@pytest.mark.parametrize(("num_steps", "stages"), [(1, []), (5 + 2, [1]), (2 * 5 + 1, [1, 2])])
def test_of_a_copy_that_ends_between_stages_no_chunk_is_whole(num_steps: int, stages: list[int], end: str) -> None:
    copies = big_copy(stages=3)
    for _ in range(num_steps):
        copies.take_step()
    getattr(copies, end)(1)
    copies.poll()
    copies.take_step()
    assert copies.wait_s is None
    assert copies.device.in_flight == set()
    assert copies.stages == [(1, number) for number in stages]
    assert [(each.num_chunks, each.failure and each.failure.code) for each in copies.done] == [(0, "cancelled")]


def test_the_last_stage_makes_chunks_whole() -> None:
    copies = big_copy(stages=2)
    copies.device.step_bytes = 32 << 20  # two chunks of a stage
    while len(copies.device.steps_taken) < (3 + 1) * 4:
        copies.take_step()
    copies.take_step()
    copies.cancel(1)
    copies.take_step()
    assert [(each.num_chunks, each.failure and each.failure.code) for each in copies.done] == [(2, "cancelled")]


def test_the_first_stages_of_all_jobs_of_a_turn_come_before_second_ones() -> None:
    """An engine that waits for the first layers of several loads has them."""
    tasks = [replace(task(job, direction=Direction.SCATTER), stages=2) for job in (1, 2)]
    copies = started(*tasks, task(3, direction=Direction.SCATTER))
    while copies.wait_s is not None:
        copies.poll()
        copies.take_step()
    assert copies.device.begun == [1, 2, 3]
    assert copies.device.steps_taken == [1] * 4 + [2] * 4 + [3] * 4 + [1] * 4 + [2] * 4
    assert copies.stages == [(1, 1), (2, 1)]
    assert [each.job_id for each in copies.done] == [3, 1, 2]
