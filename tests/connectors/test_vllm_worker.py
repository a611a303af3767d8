"""A worker's jobs: whatever becomes of them, each request is reported, and each failed block is named."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from connectors.vllm_doubles import Client, Clock
from kvferry.connectors.vllm.plans import JobEnd, LoadPlan, StepPlan, StorePlan
from kvferry.connectors.vllm.worker import GRACE_S, MAX_JOBS, MAX_STORES, WorkerSide
from kvferry.errors import RequestError, ServerGoneError
from kvferry.layout import KeyContext
from kvferry.protocol.messages import Error, Retrieved, Stored


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., WorkerSide]


@pytest.fixture
def make(client: Client, clock: Clock) -> Make:
    def make(can_drop_loads: bool = True) -> WorkerSide:
        return WorkerSide(client, load_timeout_s=5.0, can_drop_loads=can_drop_loads, clock=clock)  # type: ignore[arg-type]

    return make


def load(job_id: int = 1, name: str = "r", lease: int = 7, skip: int = 1) -> StepPlan:
    return StepPlan(loads=(LoadPlan(job_id, name, lease, (10, 11, 12, 13), skip, 8),))


def store(job_id: int = 2) -> StepPlan:
    return StepPlan(stores=(StorePlan(job_id, bytes(4 * 64), KeyContext(), tuple(range(8)), 0),))


def told(worker: WorkerSide) -> tuple[set[str], set[int]]:
    worker.poll(idle=False)
    return worker.take_received(), worker.take_failed_blocks()


def test_a_load_that_goes_well(client: Client, make: Make) -> None:
    worker = make()
    worker.start_loads(load())
    assert told(worker) == (set(), set())
    client.jobs[0].end(Retrieved(1, 1))
    assert told(worker) == ({"r"}, set())
    report = worker.take_report()
    assert report is not None
    assert report.ended == {1: JobEnd(1, False)}
    assert told(worker) == (set(), set())  # once
    assert worker.take_report() is None


def test_exactly_the_failed_blocks_are_named(client: Client, make: Make) -> None:
    worker = make()
    worker.start_loads(load())
    client.jobs[0].end(Error(1, "integrity", "damaged", failed_blocks=b"\x0d\0\0\0"))
    assert told(worker) == ({"r"}, {13})
    report = worker.take_report()
    assert report is not None
    assert report.ended == {1: JobEnd(1, True)}


@pytest.mark.parametrize("error", [ServerGoneError("gone"), RequestError("lease", "overdue"), ValueError("too long")])
def test_what_cannot_begin_has_failed(client: Client, make: Make, error: Exception) -> None:
    worker = make()
    client.error = error
    worker.start_loads(load())
    worker.start_stores(store())
    assert told(worker) == ({"r"}, {11, 12, 13})  # the block that was there already is good
    report = worker.take_report()
    assert report is not None
    assert report.ended == {1: JobEnd(1, True), 2: JobEnd(1, True)}


def test_without_a_registration_everything_fails_at_once(make: Make) -> None:
    worker = WorkerSide(None, load_timeout_s=5, can_drop_loads=True)
    worker.start_loads(load())
    worker.start_stores(store())
    assert told(worker) == ({"r"}, {11, 12, 13})
    worker.close()


def test_while_asleep_everything_fails_and_jobs_end(client: Client, make: Make) -> None:
    worker = make()
    worker.start_loads(load())
    worker.use(None)
    assert client.closed
    worker.start_stores(store())
    client.jobs[0].end(ServerGoneError("this client was closed"))
    assert told(worker) == ({"r"}, {11, 12, 13})
    awake = Client()
    worker.use(awake)  # type: ignore[arg-type]
    worker.start_loads(load(3))
    awake.jobs[0].end(Retrieved(1, 1))
    assert told(worker) == ({"r"}, set())


def test_a_load_that_vllm_changed_is_not_begun(client: Client, make: Make) -> None:
    worker = make()
    worker.start_loads(load(lease=0))
    assert not client.jobs
    assert told(worker) == ({"r"}, {11, 12, 13})


def test_a_load_that_takes_too_long_is_stopped_then_given_up(client: Client, make: Make, clock: Clock) -> None:
    worker = make()
    worker.start_loads(load())
    clock.now += 5.5
    assert told(worker) == (set(), set())
    assert client.cancelled == 0  # the server fails it by itself
    clock.now += GRACE_S
    assert told(worker) == (set(), set())
    assert told(worker) == (set(), set())
    assert client.cancelled == 1
    clock.now += GRACE_S
    worker.poll(idle=False)
    assert worker.dropped == {"r"}
    assert (worker.take_received(), worker.take_failed_blocks()) == ({"r"}, set())
    report = worker.take_report()
    assert report is not None
    assert (report.ended, report.dropped) == ({}, {"r"})  # the blocks are not free yet

    client.jobs[0].end(ServerGoneError("its process has ended"))
    assert told(worker) == (set(), set())  # reporting twice would end the engine
    report = worker.take_report()
    assert report is not None
    assert (report.ended, report.dropped) == ({1: JobEnd(1, True)}, set())


def test_where_vllm_cannot_drop_a_load_the_request_waits(client: Client, make: Make, clock: Clock) -> None:
    worker = make(can_drop_loads=False)
    worker.start_loads(load())
    clock.now += 1000
    assert told(worker) == (set(), set())
    client.jobs[0].end(ServerGoneError("its process has ended"))
    assert told(worker) == ({"r"}, {11, 12, 13})


def test_all_blocks_bad_is_as_good_as_dropping(client: Client, make: Make, clock: Clock) -> None:
    worker = make(can_drop_loads=False)
    worker.start_loads(load(skip=0))
    clock.now += 1000
    assert told(worker) == ({"r"}, {10, 11, 12, 13})
    assert worker.dropped == {"r"}
    client.jobs[0].end(ServerGoneError("its process has ended"))
    assert told(worker) == (set(), set())


def test_stores_are_counted_and_reported(client: Client, make: Make) -> None:
    worker = make()
    worker.start_stores(store())
    client.jobs[0].end(Stored(1, 3, 2, 1))
    told(worker)
    counts = worker.counters.take()
    assert (counts["chunks_stored"], counts["chunks_present"], counts["chunks_skipped"]) == (3, 2, 1)
    report = worker.take_report()
    assert report is not None
    assert report.ended == {2: JobEnd(1, False)}


def many(count: int) -> StepPlan:
    return StepPlan(stores=tuple(store(number).stores[0] for number in range(100, 100 + count)))


def test_more_jobs_than_the_client_has_events_for_wait_for_their_turn(client: Client, make: Make) -> None:
    """Where all events are in use, the next call would wait in vLLM's step."""
    worker = make()
    worker.start_stores(many(MAX_STORES + 3))
    assert len(client.jobs) == MAX_STORES
    for number in range(MAX_JOBS):
        worker.start_loads(load(number, f"r{number}"))
    assert len(client.jobs) == MAX_JOBS  # stores leave some to loads
    for job in client.jobs[:2]:
        job.end(Stored(1, 1, 0, 0))
    told(worker)
    assert [type(job._expected) for job in client.jobs[MAX_JOBS:]] == [type(Retrieved)] * 2  # loads come first
    for _ in range(3):
        for job in client.jobs:
            job.end(Stored(1, 1, 0, 0) if job._expected is Stored else Retrieved(1, 1))
        worker.poll(idle=False)
    assert len(worker.take_received()) == MAX_JOBS
    report = worker.take_report()
    assert report is not None
    assert len(report.ended) == MAX_STORES + 3 + MAX_JOBS


def test_what_cannot_begin_in_time_has_failed(client: Client, make: Make, clock: Clock) -> None:
    worker = make()
    worker.start_stores(many(MAX_STORES + 1))
    for number in range(MAX_JOBS - MAX_STORES):
        worker.start_loads(load(number, "early"))
    clock.now += 1
    worker.start_loads(load(50, "late", skip=2))
    clock.now += 5.5
    assert told(worker) == ({"late"}, {12, 13})
    report = worker.take_report()
    assert report is not None
    assert report.ended == {100 + MAX_STORES: JobEnd(1, True), 50: JobEnd(1, True)}


def test_what_has_not_begun_when_memory_is_taken_away_has_failed(client: Client, make: Make) -> None:
    worker = make()
    worker.start_stores(many(MAX_STORES + 1))
    worker.use(None)
    for job in client.jobs:
        job.end(ServerGoneError("this client was closed"))
    told(worker)
    report = worker.take_report()
    assert report is not None
    assert len(report.ended) == MAX_STORES + 1
    awake = Client()
    worker.use(awake)  # type: ignore[arg-type]
    told(worker)
    assert not awake.jobs


def test_an_idle_step_waits_for_a_job_but_not_long(client: Client, make: Make) -> None:
    worker = make()
    worker.start_loads(load())
    worker.poll(idle=True)
    assert worker.take_received() == set()
    client.jobs[0].end(Retrieved(1, 1))
    worker.poll(idle=True)
    assert worker.take_received() == {"r"}


def test_each_kind_of_failure_is_logged_once_until_it_is_over(
    client: Client, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    worker = make()
    for number in range(3):
        worker.start_loads(load(number))
        client.jobs[-1].end(ServerGoneError("it went away"))
        told(worker)
    assert caplog.text.count("it went away") == 1
    worker.start_loads(load(8))
    client.jobs[-1].end(Retrieved(1, 1))
    told(worker)
    worker.start_loads(load(9))
    client.jobs[-1].end(ServerGoneError("it went away"))
    told(worker)
    assert caplog.text.count("it went away") == 2


def test_nothing_is_sent_to_a_server_that_does_not_read(client: Client, make: Make, clock: Clock) -> None:
    """What waits begins when it reads again, or has failed in time; a cancel waits, too."""
    worker = make()
    worker.start_loads(load(1, "first"))
    client.congested = True
    worker.start_loads(load(2, "second", skip=3))
    worker.start_stores(store(3))
    assert len(client.jobs) == 1
    clock.now += 5 + GRACE_S + 0.5
    assert told(worker) == ({"second"}, {13})
    assert client.cancelled == 0
    report = worker.take_report()
    assert report is not None
    assert report.ended == {2: JobEnd(1, True), 3: JobEnd(1, True)}
    client.congested = False
    told(worker)
    assert client.cancelled == 1
    worker.start_stores(store(4))
    assert len(client.jobs) == 2
