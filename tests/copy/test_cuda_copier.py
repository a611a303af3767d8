"""The CUDA copier's kernel over the double of an old driver: every case against the oracle, cancelling, failing."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from copy_checks import check_gather, check_scatter, chunks_in, flat_side, idle, planned
from copy_layouts import CASES, UNTOUCHED, make_case
from doubles import copy_kernel, fake_cuda
from kvferry.copy import CopyPlan, CudaCopier, oracle
from kvferry.cuda.device import bound
from kvferry.errors import CopyCancelled, CudaError

STAGING = 256 << 10


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """The kernel's source as host code; None without a compiler."""
    return copy_kernel.compile_source(tmp_path_factory.mktemp("kernel")) if shutil.which("g++") else None


@pytest.fixture(params=["twin", "source"])
def driver(request: pytest.FixtureRequest, compiled: ctypes.CDLL | None) -> Iterator[fake_cuda.FakeDriver]:
    with fake_cuda.installed(old=True) as driver:
        if request.param == "twin":
            copy_kernel.install(driver)
        elif compiled is None:
            pytest.skip("needs g++")
        else:
            copy_kernel.install_source(driver, compiled)
        yield driver


@pytest.fixture
def copier(driver: fake_cuda.FakeDriver) -> Iterator[CudaCopier]:
    with CudaCopier(0, STAGING) as copier:
        yield copier


@pytest.mark.parametrize("name", CASES)
def test_gather(copier: CudaCopier, name: str) -> None:
    check_gather(copier, CASES[name], 1)


@pytest.mark.parametrize("name", CASES)
def test_scatter(copier: CudaCopier, name: str) -> None:
    case = CASES[name]
    check_scatter(copier, case, len(case.ids) // 3)
    check_scatter(copier, case, len(case.ids) // 3, num_stages=min(3, len(case.layout.planes)))


@pytest.mark.parametrize("staging", [32, 100, 4096, 65_536])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_steps_end_anywhere(driver: fake_cuda.FakeDriver, staging: int, per_chunk: int) -> None:
    """Within chunks that are larger than the staging, within blocks, and after many chunks; any number skipped."""
    case = make_case([1, 300, 77, 20], num_blocks=12, per_chunk=per_chunk, num_chunks=12 // per_chunk, pad=3)
    with CudaCopier(0, staging) as copier:
        check_gather(copier, case, 5)
        for skip in (0, 1, 2, 3, 5, 11, 12):
            check_scatter(copier, case, skip)


def test_caches_take_turns(copier: CudaCopier) -> None:
    """What the kernel reads is another cache's each time, and of a size that needs a larger table."""
    many = make_case([4], num_blocks=100_000, per_chunk=25_000, num_chunks=4)
    for case in (BIG, many, BIG, CASES["bytes_1"], many):
        storages = case.random_storages(9)
        memory, flats = flat_side(case)
        plan = planned(case, storages, flats)
        if case is many:
            copier_takes_in(copier, plan)
            continue
        copier.gather(plan)
        expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
        assert all(np.array_equal(*pair) for pair in zip(chunks_in(memory, case, flats), expected, strict=True))


def copier_takes_in(copier: CudaCopier, plan: CopyPlan) -> None:
    """Begin a copy, and cancel it before its first step: the double would take long to run it."""
    with pytest.raises(CopyCancelled, match="after 0 bytes"):
        copier.scatter(plan, lambda: True)


BIG = make_case([64 << 10], num_blocks=48, per_chunk=2, num_chunks=24)


def test_both_halves_take_many_turns(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    """3 MiB through two halves of 128 KiB; the table of a half is never written before its kernel has read it."""
    storages = BIG.random_storages(5)
    memory, flats = flat_side(BIG)
    copier.warm()
    before = driver.fake.calls["cuLaunchKernel"]
    copier.gather(planned(BIG, storages, flats))
    assert driver.fake.calls["cuLaunchKernel"] - before == 24
    expected = oracle.gather(BIG.layout, storages, BIG.ids, num_chunks=BIG.num_chunks)
    for found, chunk in zip(chunks_in(memory, BIG, flats), expected, strict=True):
        assert np.array_equal(found, chunk)


def test_cancel_waits_for_what_was_launched(driver: fake_cuda.FakeDriver, copier: CudaCopier) -> None:
    storages = BIG.random_storages(6)
    memory, flats = flat_side(BIG)
    plan = planned(BIG, storages, flats)
    answers = iter([False] * 5 + [True])
    with pytest.raises(CopyCancelled, match="after 655360 bytes"):
        copier.gather(plan, lambda: next(answers))
    assert idle(driver)
    expected = oracle.gather(BIG.layout, storages, BIG.ids, num_chunks=BIG.num_chunks)
    found = chunks_in(memory, BIG, flats)
    assert all(np.array_equal(found[index], expected[index]) for index in range(5))
    assert np.all(found[5] == UNTOUCHED)
    copier.gather(plan)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord"])
@pytest.mark.parametrize("gather", [True, False])
def test_a_failing_call_leaves_nothing_in_flight(driver: fake_cuda.FakeDriver, call: str, gather: bool) -> None:
    storages = BIG.random_storages(7)
    memory, flats = flat_side(BIG)
    with CudaCopier(0, STAGING) as copier:
        copier.warm()
        driver.fake.failures[call] = [700] if call == "cuMemcpyHtoDAsync_v2" else [0, 0, 0, 700]
        with pytest.raises(CudaError, match=call):
            (copier.gather if gather else copier.scatter)(planned(BIG, storages, flats))
        assert idle(driver)
        copier.gather(planned(BIG, storages, flats))
        assert memory[-1] == UNTOUCHED


def test_everything_is_given_back(driver: fake_cuda.FakeDriver) -> None:
    with bound(0) as drv:
        free, _ = drv.mem_get_info()
    copier = CudaCopier(0, STAGING)
    copier.warm()
    with bound(0) as drv:
        assert free - drv.mem_get_info()[0] == STAGING + (256 << 10), "the staging, and what the kernel reads"
    copier.close()
    copier.close()
    with bound(0) as drv:
        assert drv.mem_get_info()[0] == free
    assert driver.fake.calls["cuStreamDestroy_v2"] == driver.fake.calls["cuEventDestroy_v2"] == 2
    assert driver.fake.calls["cuModuleUnload"] == 1


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuEventCreate", "cuModuleGetFunction"])
def test_failing_to_prepare_gives_everything_back(driver: fake_cuda.FakeDriver, call: str) -> None:
    with bound(0) as drv:
        free, _ = drv.mem_get_info()
    driver.fake.failures[call] = [0, 2] if call != "cuModuleGetFunction" else [2]
    copier = CudaCopier(0, STAGING)
    with pytest.raises(CudaError, match=call):
        copier.warm()
    with bound(0) as drv:
        assert drv.mem_get_info()[0] == free
    assert driver.fake.calls["cuModuleUnload"] == 1
    copier.warm()
    copier.close()


def test_works_in_a_thread_without_a_context(copier: CudaCopier) -> None:
    case = CASES["pages_dense"]
    storages = case.random_storages(8)
    memory, flats = flat_side(case)
    thread = threading.Thread(target=copier.gather, args=(planned(case, storages, flats),))
    thread.start()
    thread.join(timeout=30)
    expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
    assert all(np.array_equal(*pair) for pair in zip(chunks_in(memory, case, flats), expected, strict=True))


def test_forgotten_copier_warns(driver: fake_cuda.FakeDriver) -> None:
    copier = CudaCopier(0, STAGING)
    copier.warm()
    with pytest.warns(ResourceWarning, match="CudaCopier on device 0"):
        copier.__del__()
    copier.close()


@pytest.mark.parametrize(("staging", "ctas"), [(1, 32), (1 << 30, 32), (STAGING, 0)])
def test_sizes_out_of_range(staging: int, ctas: int) -> None:
    with pytest.raises(ValueError, match="staging of"):
        CudaCopier(0, staging, max_ctas=ctas)
