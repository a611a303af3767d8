"""The CUDA copier's other way, by the copy engine alone, over the double of the driver."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copy_checks import check_gather, check_scatter, chunks_in, flat_side, idle, planned
from copy_layouts import CASES, UNTOUCHED, make_case
from doubles import copy_kernel, fake_cuda
from kvferry.copy import CudaCopier, oracle
from kvferry.copy.direct import mean_run_bytes, runs_of
from kvferry.cuda.device import bound
from kvferry.errors import CopyCancelled, CudaError

BLOCK = 64 << 10
BIG = make_case([BLOCK], num_blocks=48, per_chunk=2, num_chunks=24)


@pytest.fixture
def driver() -> Iterator[fake_cuda.FakeDriver]:
    with fake_cuda.installed() as driver:
        copy_kernel.install(driver)
        yield driver


@pytest.fixture
def copier(driver: fake_cuda.FakeDriver) -> Iterator[CudaCopier]:
    with CudaCopier(0, 256 << 10) as copier:
        copier.warm()
        yield copier


@pytest.fixture
def always_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.copy.cuda.MIN_RUN_BYTES", 0)


@pytest.mark.usefixtures("always_direct")
@pytest.mark.parametrize("name", CASES)
def test_both_ways(driver: fake_cuda.FakeDriver, copier: CudaCopier, name: str) -> None:
    case, before = CASES[name], driver.fake.calls["cuLaunchKernel"]
    check_gather(copier, case, 1)
    for skip in (0, 1, len(case.ids) // 3, len(case.ids)):
        check_scatter(copier, case, skip)
        check_scatter(copier, case, skip, num_stages=min(3, len(case.layout.planes)))
    assert driver.fake.calls["cuLaunchKernel"] == before
    assert driver.fake.calls["cuMemcpyBatchAsync_v2"] > 0


@pytest.mark.usefixtures("always_direct")
@pytest.mark.parametrize("step_bytes", [1, 100, 1 << 20])
def test_steps_of_any_size(monkeypatch: pytest.MonkeyPatch, copier: CudaCopier, step_bytes: int) -> None:
    for name in ("_STEP_BYTES", "_PART_BYTES", "_FIRST_PART_BYTES"):
        monkeypatch.setattr(f"kvferry.copy.direct.{name}", step_bytes)
    case = make_case([1, 300, 77, 20], num_blocks=12, per_chunk=3, num_chunks=4, pad=3)
    check_gather(copier, case, 5)
    check_scatter(copier, case, 4)


@pytest.mark.parametrize(("block", "direct"), [(32 << 10, True), (16 << 10, False)])
def test_small_blocks_are_the_kernels(
    driver: fake_cuda.FakeDriver, copier: CudaCopier, block: int, direct: bool
) -> None:
    case = make_case([block] * 2, num_blocks=8, per_chunk=2, num_chunks=2)
    before = driver.fake.calls["cuLaunchKernel"]
    check_gather(copier, case, 0)
    check_scatter(copier, case, 0)
    assert (driver.fake.calls["cuLaunchKernel"] == before) is direct
    assert (driver.fake.calls["cuMemcpyBatchAsync_v2"] > 0) is direct


def test_neighbours_are_one_copy(copier: CudaCopier) -> None:
    """Blocks of 4 KiB, 16 of a chunk in their order: 64 KiB side by side, unless there are gaps between them."""
    dense = make_case([4096] * 2, num_blocks=32, per_chunk=16, num_chunks=2)
    gaps = make_case([4096] * 2, num_blocks=32, per_chunk=16, num_chunks=2, pad=16)
    dense.ids[:] = gaps.ids[:] = range(32)
    for case, size in ((dense, 16 * 4096), (gaps, 4096)):
        storages = case.random_storages(1)
        plan = planned(case, storages, flat_side(case)[1])
        assert mean_run_bytes(plan) == size
        assert set(runs_of(plan, to_flat=True)[2].tolist()) == {size}
        check_gather(copier, case, 0)
        check_scatter(copier, case, 5)


@given(st.data())
def test_runs_are_the_rows(data: st.DataObject) -> None:
    """The same bytes go to the same places, in fewer rows, none of them empty; and so when they are cut."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    per_chunk, num_chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    case = make_case(
        lengths, num_blocks=16, per_chunk=per_chunk, num_chunks=num_chunks, pad=data.draw(st.sampled_from([0, 2]))
    )
    case.ids[:] = data.draw(st.permutations(range(16)).filter(lambda _: True))[: len(case.ids)]
    if data.draw(st.booleans()):
        case.ids.sort()
    skip = data.draw(st.integers(0, len(case.ids)))
    storages = case.random_storages(1)
    plan = planned(case, storages, flat_side(case)[1], skip)
    rows = runs_of(plan, to_flat=False)
    moved = [(int(t) + i, int(s) + i) for t, s, n in rows.T for i in range(n)]
    expected = [(int(t) + i, int(s) + i) for t, s, n in plan.rows(to_flat=False) for i in range(n)]
    assert sorted(moved) == sorted(expected)
    assert (rows[2] > 0).all()
    assert rows.flags.c_contiguous
    if rows.shape[1]:
        assert mean_run_bytes(plan) == pytest.approx(rows[2].mean())


@pytest.mark.usefixtures("always_direct")
def test_a_driver_of_cuda_12_8(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    del driver._functions["cuMemcpyBatchAsync_v2"]
    check_gather(copier, BIG, 0)
    check_scatter(copier, BIG, 7)
    assert driver.fake.calls["cuMemcpyBatchAsync"] > 0


def test_cancel_waits_for_what_was_started(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    storages = BIG.random_storages(6)
    memory, flats = flat_side(BIG)
    plan = planned(BIG, storages, flats)
    expected = oracle.gather(BIG.layout, storages, BIG.ids, num_chunks=BIG.num_chunks)
    with pytest.MonkeyPatch.context() as patch:
        small_steps(patch)
        answers = iter([False] * 5 + [True])
        with pytest.raises(CopyCancelled, match=f"after {5 * 2 * BLOCK} bytes"):
            copier.gather(plan, lambda: next(answers))
        assert idle(driver)
        found = chunks_in(memory, BIG, flats)
        assert all(np.array_equal(found[index], expected[index]) for index in range(5))
        assert np.all(found[5] == UNTOUCHED)
    copier.gather(plan)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def small_steps(patch: pytest.MonkeyPatch) -> None:
    """A step is a chunk of BIG."""
    for name in ("_PART_BYTES", "_FIRST_PART_BYTES"):
        patch.setattr(f"kvferry.copy.direct.{name}", 2 * BLOCK)


def wait_for(gate: threading.Event) -> None:
    gate.wait(30)


def test_no_more_than_four_steps_are_under_way(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    storages, (memory, flats) = BIG.random_storages(6), flat_side(BIG)
    plan = planned(BIG, storages, flats)
    with pytest.MonkeyPatch.context() as patch, bound(0) as drv:
        small_steps(patch)
        gate = threading.Event()
        held = driver.fake.stream(copier._direct._stream.handle)  # type: ignore[union-attr]
        held.push(functools.partial(wait_for, gate))
        with closing(copier.steps(plan, to_flat=True)) as steps:
            for _ in range(5):
                next(steps)
            fifth = threading.Thread(target=next, args=(steps,))
            fifth.start()
            fifth.join(0.2)
            assert fifth.is_alive()
            assert driver.fake.calls["cuMemcpyBatchAsync_v2"] == 4
            gate.set()
            fifth.join(30)
        assert idle(driver)
        del drv
    assert np.any(memory != UNTOUCHED)


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync_v2", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize("to_flat", [True, False])
def test_a_failing_call_leaves_nothing_in_flight(
    driver: fake_cuda.FakeDriver, copier: CudaCopier, call: str, to_flat: bool
) -> None:
    storages, (memory, flats) = BIG.random_storages(7), flat_side(BIG)
    with pytest.MonkeyPatch.context() as patch:
        small_steps(patch)
        driver.fake.failures[call] = [0, 0, 0, 700]
        with pytest.raises(CudaError, match=call):
            (copier.gather if to_flat else copier.scatter)(planned(BIG, storages, flats))
        assert idle(driver)
        copier.gather(planned(BIG, storages, flats))
    assert memory[-1] == UNTOUCHED


def test_an_end_that_cannot_be_marked_is_waited_for(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    """One step, whose own event is recorded; the one that is to say that it is done is not."""
    storages, (_, flats) = BIG.random_storages(7), flat_side(BIG)
    raised: list[str] = []

    def gather() -> None:
        try:
            copier.gather(planned(BIG, storages, flats))
        except CudaError as error:
            raised.append(error.call)

    gate, copying = threading.Event(), threading.Thread(target=gather)
    with bound(0):
        driver.fake.stream(copier._direct._stream.handle).push(functools.partial(wait_for, gate))  # type: ignore[union-attr]
    driver.fake.failures["cuEventRecord"] = [0, 2]
    copying.start()
    copying.join(0.2)
    was_waiting = copying.is_alive()
    gate.set()
    copying.join(30)
    assert was_waiting
    assert raised == ["cuEventRecord"]
    assert idle(driver)


def test_two_copies_take_turns_in_one_thread(copier: CudaCopier) -> None:
    """Steps of a gather and of a scatter of two copiers, one after the other: each has its own bytes."""
    storages, (memory, flats) = BIG.random_storages(8), flat_side(BIG)
    chunks, (source, places) = BIG.random_chunks(9), flat_side(BIG)
    for place, chunk in zip(chunks_in(source, BIG, places), chunks, strict=True):
        place[:] = chunk
    back = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in BIG.storage_bytes]
    wanted = [storage.copy() for storage in back]
    oracle.scatter(BIG.layout, wanted, BIG.ids, chunks, 0)
    with CudaCopier(0, 256 << 10) as other, pytest.MonkeyPatch.context() as patch:
        small_steps(patch)
        both = [
            copier.steps(planned(BIG, storages, flats), to_flat=True),
            other.steps(planned(BIG, back, places), to_flat=False),
        ]
        while both:
            both = [steps for steps in both if next(steps, None) is not None]
    expected = oracle.gather(BIG.layout, storages, BIG.ids, num_chunks=BIG.num_chunks)
    assert all(np.array_equal(*pair) for pair in zip(chunks_in(memory, BIG, flats), expected, strict=True))
    assert np.array_equal(back[0], wanted[0])
