"""Copies from cache to cache, on the host and over the double of the driver, against the definition."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copy_checks import idle
from copy_layouts import UNTOUCHED, Case, make_case
from doubles import copy_kernel, fake_cuda
from kvferry.copy.oracle import Bytes
from kvferry.copy.pair_copiers import CudaPairCopier, HostPairCopier, PairCopier
from kvferry.copy.pairs import BlockPairs
from kvferry.cuda.device import bound
from kvferry.errors import CudaError
from serving.process import eventually

# What a block is cut into, bytes between the blocks here and there, and what a copy shares with a 16-byte boundary.
CASES = {
    "bytes": ([1, 3, 100, 7], 0, 5),
    "words": ([4, 20, 132], 4, 12),
    "vectors": ([4096, 576], 48, 0),
    "dense": ([4096] * 4, 0, 0),
    "long": ([1 << 17, 48 << 10], 0, 0),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    return copy_kernel.compile_source(tmp_path_factory.mktemp("kernel")) if shutil.which("g++") else None


@pytest.fixture(params=["host", "twin", "source", "engine"])
def copier(request: pytest.FixtureRequest, compiled: ctypes.CDLL | None) -> Iterator[PairCopier]:
    if request.param == "host":
        yield HostPairCopier()
        return
    with fake_cuda.installed(old=request.param != "engine") as driver:
        if request.param == "source":
            if compiled is None:
                pytest.skip("needs g++")
            copy_kernel.install_source(driver, compiled)
        else:
            copy_kernel.install(driver)
        with CudaPairCopier(0) as made:
            yield made


def sides(name: str) -> tuple[Case, Case]:
    """The cache that is written and the one that is read."""
    lengths, to_pad, from_pad = CASES[name]
    return (
        make_case(lengths, num_blocks=20, per_chunk=1, num_chunks=12, pad=to_pad, seed=1),
        make_case(lengths, num_blocks=31, per_chunk=1, num_chunks=12, pad=from_pad, seed=2),
    )


def paired(to: Case, source: Case, storages: tuple[list[Bytes], list[Bytes]]) -> BlockPairs:
    columns = []
    for target, origin in zip(to.layout.planes, source.layout.planes, strict=True):
        here, there = storages[0][target.storage].ctypes.data, storages[1][origin.storage].ctypes.data
        columns.append((here + target.offset, target.stride, there + origin.offset, origin.stride, target.length))
    ids = (np.array(case.ids, dtype=np.int32) for case in (to, source))
    return BlockPairs(np.array(columns, dtype=np.int64).T, *ids)


def expected(to: Case, source: Case, read: list[Bytes]) -> list[Bytes]:
    """What is written then, byte range by byte range."""
    written = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in to.storage_bytes]
    for target, origin in zip(to.layout.planes, source.layout.planes, strict=True):
        for to_id, from_id in zip(to.ids, source.ids, strict=True):
            start, first = target.offset + to_id * target.stride, origin.offset + from_id * origin.stride
            piece = read[origin.storage][first : first + origin.length]
            written[target.storage][start : start + target.length] = piece
    return written


@pytest.mark.parametrize("name", CASES)
def test_shuffled_on_both_sides(copier: PairCopier, name: str) -> None:
    to, source = sides(name)
    read = source.random_storages(3)
    written = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in to.storage_bytes]
    pairs = paired(to, source, (written, read))
    assert pairs.block_bytes == to.layout.block_bytes
    for start in range(0, len(to.ids), 5):  # more steps than may be under way are waited for one by one
        done = copier.submit(pairs.part(start, start + 5), same_gpu=True)
        eventually(done)
    for one, other in zip(written, expected(to, source, read), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("from_ids", "by_engine"),
    [
        (range(3, 15), True),
        ([*range(12, 18), *range(6)], True),  # two runs
        ([5, 3, 11, 0, 8, 1, 14, 2, 9, 7, 12, 4], False),
        ([*range(7), 20, 12, 18, 10, 15], False),  # most ascend, and yet the runs are short
    ],
)
def test_long_runs_of_another_gpu_are_the_copy_engines(from_ids: Sequence[int], by_engine: bool) -> None:
    block = 400 << 10
    with fake_cuda.installed() as driver:
        copy_kernel.install(driver)
        source = np.random.default_rng(1).integers(0, 256, 21 * block, dtype=np.uint8)
        target = np.zeros(12 * block, dtype=np.uint8)
        piece = np.array([[target.ctypes.data], [block], [source.ctypes.data], [block], [block]])
        pairs = BlockPairs(piece, np.arange(12, dtype=np.int32), np.array(from_ids, dtype=np.int32))
        with CudaPairCopier(0) as copier:
            before = driver.fake.calls["cuMemcpyBatchAsync_v2"] + driver.fake.calls["cuMemcpyBatchAsync"]
            eventually(copier.submit(pairs))
            after = driver.fake.calls["cuMemcpyBatchAsync_v2"] + driver.fake.calls["cuMemcpyBatchAsync"]
        assert (after > before) == by_engine
        assert np.array_equal(target.reshape(12, -1), source.reshape(21, -1)[list(from_ids)])


def test_several_steps_under_way(copier: PairCopier) -> None:
    to, source = sides("dense")
    read = source.random_storages(3)
    written = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in to.storage_bytes]
    pairs = paired(to, source, (written, read))
    done = [copier.submit(pairs.part(3 * step, 3 * step + 3)) for step in range(4)]
    eventually(lambda: all(step() for step in done))
    for one, other in zip(written, expected(to, source, read), strict=True):
        assert np.array_equal(one, other)


def test_a_large_table(copier: PairCopier) -> None:
    """More blocks and strips than the first table holds, twice."""
    case = make_case([16, 16], num_blocks=9_000, per_chunk=1, num_chunks=9_000, seed=3)
    read = case.random_storages(4)
    for _ in range(2):
        written = [np.zeros(size, dtype=np.uint8) for size in case.storage_bytes]
        eventually(copier.submit(paired(case, case, (written, read))))
        for one, other in zip(written, read, strict=True):
            assert np.array_equal(one, other)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_touches_is_one_copy(data: st.DataObject) -> None:
    """The columns are the same bytes, and none of them goes on where the one before it ends, on both sides."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    pads = data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
    ids = [data.draw(st.permutations(range(6))), data.draw(st.permutations(range(6)))]
    pieces = np.array([(0, n + pads[0], 1 << 20, n + pads[1], n) for n in lengths], dtype=np.int64).T
    pieces[0] = pieces[2] - (1 << 20) + np.arange(len(lengths)) * 1000
    pieces[2] += np.arange(len(lengths)) * 1000
    pairs = BlockPairs(pieces, np.array(ids[0], dtype=np.int32), np.array(ids[1], dtype=np.int32))
    columns = pairs.columns()
    got = {int(to + k): int(source + k) for to, source, nbytes in columns.T for k in range(nbytes)}
    wanted = {
        int(to + to_stride * a + k): int(source + from_stride * b + k)
        for to, to_stride, source, from_stride, nbytes in pieces.T
        for a, b in zip(*ids, strict=True)
        for k in range(nbytes)
    }
    assert got == wanted
    ends = columns[:2] + columns[2]
    assert not any((ends[:, i] == columns[:2, i + 1]).all() for i in range(columns.shape[1] - 1))


def test_pieces_that_touch_are_kept_apart() -> None:
    """Where one ends and the next begins on both sides may be the border of two allocations."""
    pieces = np.array([(0, 8, 1000, 8, 8), (16, 8, 1016, 8, 8)], dtype=np.int64).T
    ids = np.arange(2, dtype=np.int32)
    assert BlockPairs(pieces, ids, ids).columns().T.tolist() == [[0, 1000, 16], [16, 1016, 16]]


def test_what_was_started_before_a_failure_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.copy.pair_copiers.BATCH_ROWS", 1)
    with fake_cuda.installed() as driver:
        copy_kernel.install(driver)
        to, source = sides("long")
        read = source.random_storages(3)
        written = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in to.storage_bytes]
        with CudaPairCopier(0) as copier:
            driver.fake._streams[copier._stream.handle].push(lambda: time.sleep(0.3))
            driver.fake.failures["cuMemcpyBatchAsync_v2"] = [0, 0, 700]
            with pytest.raises(CudaError, match="cuMemcpyBatchAsync_v2"):
                copier.submit(paired(to, source, (written, read)), same_gpu=True)
            assert idle(driver)


def test_a_step_that_fails_leaves_the_copier_usable() -> None:
    with fake_cuda.installed(old=True) as driver:
        copy_kernel.install(driver)
        to, source = sides("dense")
        read = source.random_storages(3)
        written = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in to.storage_bytes]
        pairs = paired(to, source, (written, read))
        with CudaPairCopier(0) as copier:
            driver.fake.failures["cuLaunchKernel"] = [2]
            with pytest.raises(CudaError, match="cuLaunchKernel"):
                copier.submit(pairs)
            eventually(copier.submit(pairs))
        assert np.array_equal(written[0], expected(to, source, read)[0])


def test_nothing_is_kept() -> None:
    with fake_cuda.installed(old=True) as driver:
        copy_kernel.install(driver)
        with bound(0) as drv:
            before = drv.mem_get_info()
        copier = CudaPairCopier(0)
        copier.close()
        copier.close()
        with bound(0) as drv:
            assert drv.mem_get_info() == before
