"""The worker's side of TensorRT-LLM's connector on its own: what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import Job, RetrieveResult, StoreResult
from kvferry.connectors.trtllm.plans import LoadPlan, StepPlan, StorePlan
from kvferry.connectors.trtllm.worker import GRACE_S, MAX_STORES, STUCK_S, WorkerSide
from kvferry.errors import DeadlineError, KVFerryError, RequestError, ServerGoneError
from kvferry.layout import KeyContext
from kvferry.protocol.messages import Retrieved, Stored

TOKENS = b"\0" * 64 * 4


class Client:
    """Begins jobs, which tests end; `answer` ends each at once."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.streams: list[int | None] = []
        self.congested = False
        self.answer: Any = None
        self.error: Exception | None = None

    def store(self, tokens: Any, block_ids: Any, start_token: int, *, stream: int | None, **_: Any) -> Any:
        return self._begin(Job[StoreResult](block_ids, Stored), stream)

    def retrieve(self, lease_id: int, block_ids: Any, skip: int, *, stream: int | None, **_: Any) -> Any:
        return self._begin(Job[RetrieveResult](block_ids, Retrieved), stream)

    def _begin(self, job: Any, stream: int | None) -> Any:
        if self.error is not None:
            raise self.error
        self.jobs.append(job)
        self.streams.append(stream)
        if self.answer is not None:
            job.end(self.answer)
        return job

    def close(self) -> None: ...


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., WorkerSide]


@pytest.fixture
def make(client: Client, clock: Clock) -> Make:
    return lambda **fields: WorkerSide(client, load_timeout_s=0.01, clock=clock, **fields)  # type: ignore[arg-type]


def store(request_id: int = 1) -> StorePlan:
    return StorePlan(request_id, TOKENS, KeyContext(), (1, 2), 0)


def load(request_id: int = 1) -> LoadPlan:
    return LoadPlan(request_id, 5, (1, 2), 0)


def begin(worker: WorkerSide, *stores: StorePlan, going_on: frozenset[int] = frozenset()) -> None:
    worker.bind(StepPlan(stores=stores, going_on=going_on))
    worker.load(None)
    worker.store(None)


def stop(job: Any, stopped: list[Any]) -> None:
    """What the server does with a job that is cancelled."""
    stopped.append(job)
    job.end(RequestError("cancelled", "stopped"))


def test_loads_are_done_on_return(client: Client, make: Make) -> None:
    client.answer = Retrieved(1, 1)
    worker = make()
    worker.bind(StepPlan(loads=(load(1), load(2))))
    worker.load(77)
    assert client.streams == [77, 77]
    worker.load(77)  # the plan is still bound
    assert len(client.jobs) == 2


def test_a_step_that_must_not_be_computed_raises(make: Make) -> None:
    worker = make()
    worker.bind(StepPlan(broken="request 3: its lease is gone"))
    with pytest.raises(RequestError, match=r"request 3: its lease is gone\. .*the engine must not"):
        worker.load(None)


@pytest.mark.parametrize(
    "error", [ServerGoneError("it went away"), RequestError("damaged", "other bytes"), DeadlineError("too late")]
)
def test_loads_that_fail_raise(client: Client, make: Make, error: KVFerryError) -> None:
    client.answer = error
    worker = make()
    worker.bind(StepPlan(loads=(load(3),)))
    with pytest.raises(RequestError, match="promised to request 3 is not in its 2 blocks"):
        worker.load(None)


def test_loads_that_cannot_begin_raise(client: Client, make: Make) -> None:
    client.error = ServerGoneError("there is none")
    worker = make()
    worker.bind(StepPlan(loads=(load(),)))
    with pytest.raises(RequestError, match="there is none"):
        worker.load(None)


def test_a_load_that_does_not_end_is_stopped_and_raises(client: Client, make: Make, clock: Clock) -> None:
    worker = make()
    worker.bind(StepPlan(loads=(load(1), load(2))))
    clock.now = 5.0
    stopped: list[Any] = []
    retrieve = client.retrieve

    def retrieve_and_watch(*arguments: Any, **fields: Any) -> Any:
        job = retrieve(*arguments, **fields)
        job.bind(lambda: stop(job, stopped))
        clock.now += GRACE_S  # time has passed when both have begun
        return job

    client.retrieve = retrieve_and_watch  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="going on"):
        worker.load(None)
    assert stopped == client.jobs


def test_stores_of_requests_that_go_on_or_are_kept_are_not_waited_for(client: Client, make: Make) -> None:
    worker = make()
    begin(worker, store(1), store(2))
    assert worker.finished([2]) == []
    begin(worker, going_on=frozenset({1}))
    client.jobs[1].end(Stored(1, 1, 0, 0))
    assert worker.finished([]) == [2]
    assert worker.finished([]) == []
    assert worker.finished([7]) == [7]  # nothing was ever stored for it


def test_stores_of_requests_that_are_gone_end_before_the_forward(client: Client, make: Make) -> None:
    worker = make()
    begin(worker, store(1))
    stopped: list[Any] = []
    client.jobs[0].bind(lambda: stop(client.jobs[0], stopped))
    begin(worker)
    assert stopped == client.jobs
    assert worker._stores == []


def test_one_that_cannot_be_stopped_ends_the_engine(
    client: Client, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may still read blocks that the forward overwrites, and keep what it reads."""
    monkeypatch.setattr("kvferry.connectors.trtllm.worker.GRACE_S", 0.01)
    worker = make()
    begin(worker, store(1))
    with pytest.raises(DeadlineError, match="blocks of request 1, which has ended without a word"):
        begin(worker)


def test_where_blocks_are_copied_stores_end_with_their_step(client: Client, make: Make) -> None:
    worker = make(copies_blocks=True)
    begin(worker, store(1), store(2))
    for job in client.jobs:
        job.bind(lambda job=job: job.end(RequestError("cancelled", "stopped")))
    assert worker.finished([2]) == []
    assert [job.done() for job in client.jobs] == [True, False]


def test_more_stores_than_there_is_room_for_wait(client: Client, make: Make) -> None:
    worker = make()
    many = [store(number) for number in range(MAX_STORES + 2)]
    begin(worker, *many)
    assert len(client.jobs) == MAX_STORES
    client.jobs[0].end(Stored(1, 1, 0, 0))
    assert worker.finished(range(MAX_STORES + 2)) == [0]
    assert len(client.jobs) == MAX_STORES + 1
    for job in client.jobs:
        job.end(Stored(1, 1, 0, 0))
    worker.finished([])
    client.jobs[-1].end(Stored(1, 1, 0, 0))
    assert worker.finished([])[-1] == MAX_STORES + 1


def test_what_waits_is_dropped_with_its_request(client: Client, make: Make) -> None:
    worker = make()
    client.congested = True
    begin(worker, store(1))
    begin(worker)
    client.congested = False
    worker.finished([])
    assert client.jobs == []


def test_a_server_that_is_stuck_is_given_no_more(client: Client, make: Make, clock: Clock) -> None:
    worker = make()
    begin(worker, store(1))
    clock.now = STUCK_S + 1
    begin(worker, store(1), going_on=frozenset({1}))
    assert len(client.jobs) == 1
    assert worker.finished([1]) == []
    client.jobs[0].end(Stored(1, 1, 0, 0))
    assert worker.finished([]) == [1]


def test_stores_that_fail_are_told_once(client: Client, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    worker = make()
    client.answer = ServerGoneError("it went away")
    for _ in range(3):
        begin(worker, store(1))
        worker.finished([])
    client.error = ValueError("too long")
    begin(worker, store(1))
    assert caplog.text.count("it went away") == 1
    assert caplog.text.count("too long") == 1
    assert worker.finished([1]) == [1]
