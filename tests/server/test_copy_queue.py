"""Copies that wait for events: who is asked, in which order they begin, and that all of them end."""

from __future__ import annotations

import time
from typing import Any, cast

from kvferry.ipc.events import Ticket
from kvferry.server.work.copies import CopyQueue
from kvferry.server.work.device import HostDevice
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import CopyDone, CopyTask, Direction


class Events:
    """Events that are done when a test says so; counts who asks."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.num_asked = 0

    def query(self, ticket: Ticket) -> bool:
        self.num_asked += 1
        return ticket.value in self.done


class Cache:
    """An open cache of which nothing is copied."""

    def __init__(self) -> None:
        self.events: Events = Events()

    def plan(self, task: CopyTask, pool_address: int) -> None:
        return None


class Copies(CopyQueue):
    """Notes what it would copy."""

    def __init__(self, cache: Cache) -> None:
        self.done: list[CopyDone] = []
        super().__init__({1: cast(OpenedCache, cache)}, memory_address=0, post=self.done.append)
        self.begun: list[int] = []

    def _copy(self, copy: Any, stop: int, device: Any) -> None:
        self.begun.append(copy.task.job_id)

    def _chunks_a_step(self, task: CopyTask, device: Any) -> int:
        return len(task.offsets)


def task(job: int, timeout_s: float = 60.0) -> CopyTask:
    return CopyTask(
        cache_id=1,
        job_id=job,
        direction=Direction.GATHER,
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
    device = HostDevice()
    while copies.wait_s is not None:
        copies.poll()
        copies.step(device)
    assert copies.begun == list(range(1, 51))
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
    copies.step(HostDevice())
    assert copies.begun == [3]
