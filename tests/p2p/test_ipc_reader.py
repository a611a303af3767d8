"""The copying thread of the one-sided carrier, with copies that end when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.copy.pair_copiers import IsDone, PairCopier
from kvferry.copy.pairs import BlockPairs
from kvferry.errors import CudaError, TransferError
from kvferry.p2p.carriers.ipc.reader import Job, Reader
from serving.process import eventually

A: Any = "session a"
B: Any = "session b"


class Slow(PairCopier):
    """Two blocks a step, two steps under way. `steps` are those that were started: [piece, blocks, whether done]."""

    step_bytes = 20
    depth = 2

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.closed = False
        self.failure: Exception | None = None

    def submit(self, pairs: BlockPairs, *, same_gpu: bool = False) -> IsDone:
        if self.failure is not None:
            raise self.failure
        step = [int(pairs.pieces[0, 0]), pairs.to_ids.tolist(), False]
        self.steps.append(step)
        return lambda: bool(step[2])

    def end(self, count: int = 1) -> None:
        """Let so many steps be done, the oldest first."""
        for step in [step for step in self.steps if not step[2]][:count]:
            step[2] = True

    def close(self) -> None:
        assert all(step[2] for step in self.steps), "closed under a copy"
        self.closed = True


class Heard:
    """What the reader tells."""

    def __init__(self) -> None:
        self.landed: list[tuple[Any, int, int]] = []
        self.failures: list[tuple[Any, str]] = []

    def item_landed(self, session: Any, number: int, *items: int) -> None:
        self.landed += [(session, number, item) for item in items]

    def carrier_failed(self, session: Any, error: TransferError) -> None:
        self.failures.append((session, error.text))

    def released(self, number: int) -> None:
        raise AssertionError(number)

    def landing_stopped(self, session: Any, number: int) -> None:
        raise AssertionError(number)


@pytest.fixture
def parts() -> Iterator[tuple[Reader, Slow, Heard]]:
    heard, copier = Heard(), Slow()
    reader = Reader(heard)
    reader.start()
    reader.use(copier)
    yield reader, copier, heard
    copier.step_bytes = 0
    for step in copier.steps:
        step[2] = True
    reader.close()
    assert copier.closed


def job(session: Any, number: int, *, blocks: int = 2, items: int = 3, for_s: float = 60) -> Job:
    """Items of 10 bytes a block; the first address tells transfer and items."""

    def pairs(found: list[int]) -> BlockPairs:
        assert found
        pieces = np.full((5, 1), 10, dtype=np.int64)
        pieces[0] = 100 * number + sum(10**item for item in found)
        return BlockPairs(pieces, np.arange(blocks, dtype=np.int32), np.arange(blocks, dtype=np.int32))

    until = time.monotonic() + for_s
    return Job(session, number, pairs, same_gpu=False, until=until, to_come=set(range(items)))


def started(copier: Slow, count: int) -> None:
    eventually(lambda: len(copier.steps) == count)


def test_items_land_when_their_last_step_is_done(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    reader.add(job(A, 5, blocks=5))
    reader.ready(A, 5, [0, 2])
    started(copier, 2)  # as many as may be under way
    assert copier.steps[0] == [500 + 101, [0, 1], False]
    copier.end()
    started(copier, 3)
    copier.end(1)
    assert heard.landed == []
    copier.end(1)
    eventually(lambda: heard.landed == [(A, 5, 0), (A, 5, 2)])
    assert [step[1] for step in copier.steps] == [[0, 1], [2, 3], [4]]


def test_what_becomes_ready_meanwhile_is_the_next_copy(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    reader.add(job(A, 5))
    reader.ready(A, 5, [0])
    started(copier, 1)
    reader.ready(A, 5, [1])
    started(copier, 2)
    reader.ready(A, 5, [0, 1, 2, 99])  # known already, or never heard of
    copier.end(2)
    started(copier, 3)
    assert copier.steps[2][0] == 600
    copier.end()
    eventually(lambda: len(heard.landed) == 3)


def test_what_is_told_twice_is_copied_once(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    reader.add(job(A, 5))
    reader.ready(A, 5, [0, 0, 2, 0])
    started(copier, 1)
    assert copier.steps[0][0] == 500 + 101
    copier.end()
    eventually(lambda: heard.landed == [(A, 5, 0), (A, 5, 2)])


def test_transfers_take_turns(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, _ = parts
    for number in (1, 2):
        reader.add(job(A, number, blocks=4))
    reader.ready(A, 1, [0])
    reader.ready(A, 2, [0])
    started(copier, 2)
    for count in (3, 4):
        copier.end()
        started(copier, count)
    assert sorted(step[0] for step in copier.steps[:3]) in ([101, 101, 201], [101, 201, 201])


@pytest.mark.parametrize("whole_session", [False, True])
def test_a_stop_is_answered_when_nothing_is_under_way(parts: tuple[Reader, Slow, Heard], whole_session: bool) -> None:
    reader, copier, heard = parts
    answers: list[str] = []
    reader.add(job(A, 5, blocks=20))
    reader.add(job(B, 5, blocks=2))
    reader.ready(A, 5, [0])
    started(copier, 2)
    then: Callable[[], None] = lambda: answers.append("a")  # noqa: E731
    if whole_session:
        reader.drop(A, then)
    else:
        reader.stop(A, 5, then)
    reader.stop(A, 77, lambda: answers.append("unknown"))
    reader.ready(B, 5, [0])
    eventually(lambda: answers == ["unknown"])
    copier.end()
    started(copier, 3)  # b's: nothing more of a's
    assert copier.steps[2][0] == 501
    assert answers == ["unknown"]
    copier.end()
    eventually(lambda: answers == ["unknown", "a"])
    copier.end()
    eventually(lambda: heard.landed == [(B, 5, 0)])
    reader.ready(A, 5, [1])  # too late
    reader.stop(B, 5, lambda: answers.append("b"))
    eventually(lambda: answers[-1] == "b")
    assert len(copier.steps) == 3


def test_nothing_begins_after_the_lease(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    reader.add(job(A, 5, for_s=-1))
    reader.ready(A, 5, [0])
    eventually(lambda: reader.num_expired == 1)
    assert copier.steps == []
    assert not heard.landed
    assert not heard.failures


def test_a_lease_that_ends_between_two_steps(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    late = job(A, 5, blocks=20)
    reader.add(late)
    reader.ready(A, 5, [0])
    started(copier, 2)
    late.until = 0
    copier.end(2)
    eventually(lambda: reader.num_expired == 1)
    assert len(copier.steps) == 2
    assert heard.landed == []


def test_a_copy_that_fails_ends_the_session_and_no_other(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    copier.failure = CudaError("cuLaunchKernel", 2, "out of memory")
    reader.add(job(A, 5))
    reader.ready(A, 5, [0])
    eventually(lambda: len(heard.failures) == 1)
    assert heard.failures[0][0] == A
    assert "out of memory" in heard.failures[0][1]
    copier.failure = None
    reader.add(job(B, 5))
    reader.ready(B, 5, [0])
    started(copier, 1)
    copier.end()
    eventually(lambda: heard.landed == [(B, 5, 0)])


def test_another_copier_waits_for_what_is_under_way(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, heard = parts
    reader.add(job(A, 5))
    reader.ready(A, 5, [0])
    started(copier, 1)
    other = Slow()
    reader.use(other)
    copier.end()
    eventually(lambda: copier.closed)
    reader.ready(A, 5, [1])
    started(other, 1)
    other.end()
    eventually(lambda: [item for _, _, item in heard.landed] == [0, 1])
    reader.close()
    assert other.closed


def test_closing_waits_for_what_is_under_way_and_answers(parts: tuple[Reader, Slow, Heard]) -> None:
    reader, copier, _ = parts
    answers: list[str] = []
    reader.add(job(A, 5, blocks=20))
    reader.ready(A, 5, [0])
    started(copier, 2)
    reader.stop(A, 5, lambda: answers.append("stopped"))
    copier.end(2)
    reader.close()
    assert answers == ["stopped"]
    assert copier.closed
    assert len(copier.steps) == 2
