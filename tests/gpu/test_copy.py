"""The CUDA copier on a GPU: every case against the oracle, cancelling, another stream beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from copy_layouts import CASES, UNTOUCHED, Case, layout_of, make_case
from doubles.vmm_pool import VmmPool
from kvferry.copy import ChunkMap, CopyPlan, CudaCopier, oracle
from kvferry.copy.oracle import Bytes
from kvferry.cuda.driver import driver
from kvferry.errors import CopyCancelled
from kvferry.layout import Plane

pytestmark = pytest.mark.gpu

SMALL_STAGING = 256 << 10


@pytest.fixture(scope="module", params=[SMALL_STAGING, 64 << 20], ids=["small", "full"])
def copier(request: pytest.FixtureRequest) -> Iterator[CudaCopier]:
    with CudaCopier(0, request.param) as copier:
        copier.warm()
        yield copier


def on_device(storages: list[Bytes]) -> list[torch.Tensor]:
    tensors = [torch.from_numpy(storage).to("cuda:0") for storage in storages]
    torch.cuda.synchronize()
    return tensors


def on_host(tensors: list[torch.Tensor]) -> list[Any]:
    return [tensor.cpu().numpy() for tensor in tensors]


def pinned_chunks(case: Case, shift: int) -> tuple[torch.Tensor, list[int]]:
    """Pinned memory for the chunks, in shuffled places, with a gap after every other one; their addresses."""
    memory = torch.full((case.num_chunks * (case.chunk_bytes + 16) + 64,), UNTOUCHED, dtype=torch.uint8).pin_memory()
    places = np.random.default_rng(9).permutation(case.num_chunks).tolist()
    start = memory.data_ptr() + shift
    return memory, [start + place * case.chunk_bytes + place // 2 * 16 for place in places]


def planned(case: Case, tensors: list[torch.Tensor], flats: list[int], skip: int = 0) -> CopyPlan:
    chunks = ChunkMap(case.layout, [tensor.data_ptr() for tensor in tensors], case.per_chunk)
    return chunks.plan(case.ids, flats, skip)


def at(memory: torch.Tensor, case: Case, flat: int) -> Any:
    start = flat - memory.data_ptr()
    return memory[start : start + case.chunk_bytes].numpy()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_gather(copier: CudaCopier, name: str, shift: int) -> None:
    case = CASES[name]
    storages = case.random_storages(3)
    tensors = on_device(storages)
    memory, flats = pinned_chunks(case, shift)
    expected_memory = memory.clone()
    copier.gather(planned(case, tensors, flats))
    expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
    for flat, chunk in zip(flats, expected, strict=True):
        start = flat - memory.data_ptr()
        expected_memory[start : start + len(chunk)] = torch.from_numpy(chunk)
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("skip_share", [0, 0.4])
def test_scatter(copier: CudaCopier, name: str, shift: int, skip_share: float) -> None:
    case = CASES[name]
    skip = int(len(case.ids) * skip_share)
    chunks = case.random_chunks(4)
    memory, flats = pinned_chunks(case, shift)
    for flat, chunk in zip(flats, chunks, strict=True):
        at(memory, case, flat)[:] = chunk
    expected = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    tensors = on_device(expected)
    copier.scatter(planned(case, tensors, flats, skip))
    oracle.scatter(case.layout, expected, case.ids, chunks, skip)
    for found, wanted in zip(on_host(tensors), expected, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("length", [1, 3, 12, 100, 16, 4096 + 8])
@pytest.mark.parametrize(("paged_shift", "flat_shift"), list(itertools.product((0, 1, 4, 8), (0, 3, 4))))
def test_lengths_at_every_alignment(copier: CudaCopier, length: int, paged_shift: int, flat_shift: int) -> None:
    pad = 16 - length % 16 if paged_shift % 2 == 0 else 5
    num_blocks = 200
    layout = layout_of([Plane(0, paged_shift, length + pad, length)], num_blocks)
    case = Case(layout, (paged_shift + num_blocks * (length + pad),), list(range(199, -1, -1)), 20)
    storages = case.random_storages(6)
    tensors = on_device(storages)
    back = on_device([np.full(case.storage_bytes[0], UNTOUCHED, dtype=np.uint8)])
    memory, flats = pinned_chunks(case, flat_shift)
    copier.gather(planned(case, tensors, flats))
    copier.scatter(planned(case, back, flats))
    assert memory[-1] == UNTOUCHED
    expected = np.full(case.storage_bytes[0], UNTOUCHED, dtype=np.uint8)
    for block in range(num_blocks):
        start = paged_shift + block * (length + pad)
        expected[start : start + length] = storages[0][start : start + length]
    assert np.array_equal(on_host(back)[0], expected)


def test_round_trip_of_a_large_cache() -> None:
    """256 MiB of 32 layers' 64 KiB blocks, shuffled, there and back through the full staging."""
    case = make_case([64 << 10] * 32, num_blocks=160, per_chunk=4, num_chunks=32)
    cache = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0") for size in case.storage_bytes]
    back = [torch.full_like(tensor, UNTOUCHED) for tensor in cache]
    torch.cuda.synchronize()
    memory, flats = pinned_chunks(case, 0)
    with CudaCopier(0) as copier:
        copier.gather(planned(case, cache, flats))
        copier.scatter(planned(case, back, flats))
    assert memory[-1] == UNTOUCHED
    used = torch.zeros(160, dtype=torch.bool, device="cuda:0")
    used[torch.tensor(case.ids, device="cuda:0")] = True
    for one, other in zip(cache, back, strict=True):
        blocks, copied = (tensor.view(-1, 160, 64 << 10) for tensor in (one, other))
        assert torch.equal(blocks[:, used], copied[:, used])
        assert bool((copied[:, ~used] == UNTOUCHED).all())


@pytest.mark.parametrize("name", CASES)
def test_the_copy_engine_alone(copier: CudaCopier, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Blocks of any size go without the kernel, too, at any alignment, with any number skipped."""
    monkeypatch.setattr("kvferry.copy.cuda.MIN_RUN_BYTES", 0)
    test_gather(copier, name, 1)
    test_scatter(copier, name, 4, 0.0)
    test_scatter(copier, name, 0, 0.4)


@pytest.mark.parametrize("name", ["pages_dense", "big_blocks"])
def test_the_copy_engine_as_a_driver_of_cuda_12_8_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    functions = driver()._functions
    if "cuMemcpyBatchAsync" not in functions:
        pytest.skip("this driver has the newer function alone")
    monkeypatch.delitem(functions, "cuMemcpyBatchAsync_v2", raising=False)
    monkeypatch.setattr("kvferry.copy.cuda.MIN_RUN_BYTES", 0)
    with CudaCopier(0) as copier:
        test_gather(copier, name, 1)
        test_scatter(copier, name, 0, 0.4)


def test_the_copy_engine_alone_in_virtual_memory() -> None:
    """Blocks that cross the edges of physical chunks."""
    case = make_case([3 << 20], num_blocks=20, per_chunk=2, num_chunks=10)
    with closing(VmmPool(case.storage_bytes[0])) as pool, CudaCopier(0) as copier:
        cache = pool.tensor()
        cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8, device="cuda:0"))
        wanted = cache.clone()
        torch.cuda.synchronize()
        memory, flats = pinned_chunks(case, 0)
        copier.gather(planned(case, [cache], flats))
        cache.fill_(UNTOUCHED)
        torch.cuda.synchronize()
        copier.scatter(planned(case, [cache], flats))
        assert torch.equal(cache, wanted)
        assert memory[-1] == UNTOUCHED


@pytest.mark.parametrize("way", ["kernel", "direct"])
def test_cancel_waits_and_the_next_copy_is_right(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr("kvferry.copy.cuda.MIN_RUN_BYTES", 1 << 40 if way == "kernel" else 0)
    for name in ("_PART_BYTES", "_FIRST_PART_BYTES"):
        monkeypatch.setattr(f"kvferry.copy.direct.{name}", 1)
    case = make_case([64 << 10], num_blocks=96, per_chunk=2, num_chunks=48)
    storages = case.random_storages(7)
    tensors = on_device(storages)
    memory, flats = pinned_chunks(case, 0)
    plan = planned(case, tensors, flats)
    answers = iter([False] * 7 + [True])
    with CudaCopier(0, SMALL_STAGING) as copier:
        with pytest.raises(CopyCancelled):
            copier.gather(plan, lambda: next(answers))
        after = memory.clone()
        torch.cuda.synchronize()
        assert torch.equal(after, memory)
        copier.gather(plan)
    expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
    assert all(np.array_equal(at(memory, case, flat), chunk) for flat, chunk in zip(flats, expected, strict=True))


def test_a_second_stream_writes_the_neighbours() -> None:
    """While even blocks are scattered an engine's stream rewrites the odd ones: each keeps its own bytes."""
    num_blocks, block = 512, 64 << 10
    layout = layout_of([Plane(0, 0, block, block)], num_blocks)
    ids = np.random.default_rng(1).permutation(num_blocks // 2) * 2
    case = Case(layout, (num_blocks * block,), ids.tolist(), 64)
    chunks = case.random_chunks(8)
    memory, flats = pinned_chunks(case, 0)
    for flat, chunk in zip(flats, chunks, strict=True):
        at(memory, case, flat)[:] = chunk
    cache = torch.full((num_blocks, block), UNTOUCHED, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    engine = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with CudaCopier(0, 4 << 20) as copier:
        copier.warm()
        with torch.cuda.stream(engine):
            for value in range(200):
                cache[1::2] = value
        copier.scatter(planned(case, [cache], flats))
        torch.cuda.synchronize()
    expected = [np.full(num_blocks * block, UNTOUCHED, dtype=np.uint8)]
    oracle.scatter(layout, expected, case.ids, chunks)
    wanted = expected[0].reshape(num_blocks, block)
    wanted[1::2] = 199
    assert np.array_equal(cache.cpu().numpy(), wanted)


def test_staging_is_all_that_is_held() -> None:
    with CudaCopier(0) as copier:
        free, _ = torch.cuda.mem_get_info()
        copier.warm()
        held = free - torch.cuda.mem_get_info()[0]
        assert held <= (64 << 20) + (16 << 20)
