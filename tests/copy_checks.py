"""What tests of the CUDA copier over the double of the driver check, whichever way it copies."""

from __future__ import annotations

import mmap

import numpy as np

from copy_layouts import UNTOUCHED, Case
from doubles import fake_cuda
from kvferry.copy import ChunkMap, CopyPlan, CudaCopier, oracle
from kvferry.copy.oracle import Bytes


def flat_side(case: Case, shift: int = 0) -> tuple[Bytes, list[int]]:
    memory = np.frombuffer(mmap.mmap(-1, case.num_chunks * (case.chunk_bytes + 16) + 64), dtype=np.uint8)
    memory[:] = UNTOUCHED
    start = memory.ctypes.data + shift
    # Every other chunk follows its neighbour without a gap.
    return memory, [start + index * case.chunk_bytes + index // 2 * 16 for index in range(case.num_chunks)]


def planned(case: Case, storages: list[Bytes], flats: list[int], skip: int = 0) -> CopyPlan:
    bases = [storage.ctypes.data for storage in storages]
    return ChunkMap(case.layout, bases, case.per_chunk).plan(case.ids, flats, skip)


def chunks_in(memory: Bytes, case: Case, flats: list[int]) -> list[Bytes]:
    return [memory[flat - memory.ctypes.data :][: case.chunk_bytes] for flat in flats]


def check_gather(copier: CudaCopier, case: Case, shift: int) -> None:
    storages = case.random_storages(3)
    memory, flats = flat_side(case, shift)
    copier.gather(planned(case, storages, flats))
    expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
    for found, chunk in zip(chunks_in(memory, case, flats), expected, strict=True):
        assert np.array_equal(found, chunk)
        found[:] = UNTOUCHED
    assert np.all(memory == UNTOUCHED)


def check_scatter(copier: CudaCopier, case: Case, skip: int, num_stages: int = 1) -> None:
    chunks = case.random_chunks(4)
    memory, flats = flat_side(case)
    for place, chunk in zip(chunks_in(memory, case, flats), chunks, strict=True):
        place[:] = chunk
    found = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    expected = [storage.copy() for storage in found]
    plan = planned(case, found, flats, skip)
    for part in [plan.stage(stage, num_stages) for stage in range(num_stages)] if num_stages > 1 else [plan]:
        copier.scatter(part)
    oracle.scatter(case.layout, expected, case.ids, chunks, skip)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def idle(driver: fake_cuda.FakeDriver) -> bool:
    return all(stream.idle() for stream in driver.fake._streams.values())
