"""The host copier against the oracle, with the streaming code and without it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import kvferry.copy.streaming
from copy_layouts import CASES, UNTOUCHED, Case, make_case
from kvferry.copy import ChunkMap, CopyPlan, HostCopier, oracle
from kvferry.copy.oracle import Bytes
from kvferry.copy.streaming import STREAM_ROWS, StreamingCopy
from kvferry.errors import CopyCancelled


@pytest.fixture(params=["streaming", "plain"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostCopier:
    if request.param == "plain":
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        assert StreamingCopy.load() is None
    return HostCopier()


def flat_side(case: Case, shift: int) -> tuple[Bytes, list[int]]:
    """Memory for the chunks, `shift` bytes off any alignment, and their addresses."""
    memory = np.full(case.num_chunks * case.chunk_bytes + 64, UNTOUCHED, dtype=np.uint8)
    start = memory.ctypes.data + shift
    return memory, [start + index * case.chunk_bytes for index in range(case.num_chunks)]


def planned(case: Case, storages: list[Bytes], flats: list[int], skip: int = 0) -> CopyPlan:
    bases = [storage.ctypes.data for storage in storages]
    return ChunkMap(case.layout, bases, case.per_chunk).plan(case.ids, flats, skip)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_gather(copier: HostCopier, name: str, shift: int) -> None:
    case = CASES[name]
    storages = case.random_storages(3)
    memory, flats = flat_side(case, shift)
    copier.gather(planned(case, storages, flats))
    expected = np.concatenate(oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks))
    assert np.array_equal(memory[shift : shift + len(expected)], expected)
    assert set(memory[:shift]) | set(memory[shift + len(expected) :]) == {UNTOUCHED}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_scatter(copier: HostCopier, name: str, shift: int) -> None:
    case = CASES[name]
    skip = len(case.ids) // 3
    chunks = case.random_chunks(4)
    memory, flats = flat_side(case, shift)
    memory[shift : shift + case.num_chunks * case.chunk_bytes] = np.concatenate(chunks)
    found = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    expected = [storage.copy() for storage in found]
    copier.scatter(planned(case, found, flats, skip))
    oracle.scatter(case.layout, expected, case.ids, chunks, skip)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_scatter_in_stages(copier: HostCopier, name: str) -> None:
    case = CASES[name]
    chunks = case.random_chunks(4)
    memory, flats = flat_side(case, 1)
    memory[1 : 1 + case.num_chunks * case.chunk_bytes] = np.concatenate(chunks)
    found = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    expected = [storage.copy() for storage in found]
    plan = planned(case, found, flats, skip := len(case.ids) // 3)
    for stage in range(num_stages := min(3, len(case.layout.planes))):
        copier.scatter(plan.stage(stage, num_stages))
    oracle.scatter(case.layout, expected, case.ids, chunks, skip)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_cancel_stops_between_steps(copier: HostCopier) -> None:
    case = make_case([1 << 20], num_blocks=64, per_chunk=1, num_chunks=64)
    storages = case.random_storages(5)
    memory, flats = flat_side(case, 0)
    plan = planned(case, storages, flats)
    answers = iter([False, False, True])
    with pytest.raises(CopyCancelled, match="after 33554432 bytes"):
        copier.gather(plan, lambda: next(answers))
    assert set(memory[32 << 20 :][:: 1 << 16]) == {UNTOUCHED}
    with pytest.raises(CopyCancelled, match="after 0 bytes"):
        copier.scatter(plan, lambda: True)
    copier.gather(plan, lambda: False)


def test_nothing_to_do(copier: HostCopier) -> None:
    case = CASES["pages_dense"]
    copier.gather(ChunkMap(case.layout, [0, 0], 4).plan([], []))
    copier.warm()
    copier.close()


def test_other_threads_run_meanwhile(copier: HostCopier) -> None:
    """While one big run is being copied another thread gets to count: the GIL is released."""
    case = make_case([8 << 20], num_blocks=8, per_chunk=1, num_chunks=8)
    storages = case.random_storages(6)
    memory, flats = flat_side(case, 0)
    plan = planned(case, storages, flats)
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        for _ in range(10):
            copier.gather(plan)
        assert counted[0] > before
        assert memory[-1] == UNTOUCHED
    finally:
        stop.set()
        thread.join(timeout=10)


def test_code_is_what_its_source_says(tmp_path: Path) -> None:
    tools = [shutil.which("as"), shutil.which("objcopy")]
    if StreamingCopy.load() is None or None in tools:
        pytest.skip("needs x86-64 with as and objcopy")
    source = Path(kvferry.copy.streaming.__file__).with_suffix(".S")
    made, code = tmp_path / "streaming.o", tmp_path / "streaming.bin"
    subprocess.run(["as", str(source), "-o", str(made)], check=True, timeout=30)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", str(made), str(code)], check=True, timeout=30)
    assert code.read_bytes() == STREAM_ROWS


def test_streaming_copies_every_length_at_every_alignment() -> None:
    streaming = StreamingCopy.load()
    if streaming is None:
        pytest.skip("needs x86-64")
    rng = np.random.default_rng(8)
    source = rng.integers(0, 256, 40_000, dtype=np.uint8)
    for length in (0, 1, 15, 16, 17, 63, 64, 65, 127, 4095, 16_383, 16_384, 16_385, 16_384 + 64, 2 * 16_384 + 79):
        for target_shift, source_shift in ((0, 0), (1, 0), (0, 1), (15, 16), (16, 3), (7, 7)):
            target = np.full(40_000, UNTOUCHED, dtype=np.uint8)
            start = -target.ctypes.data % 64 + target_shift
            rows = np.array([[target.ctypes.data + start, source.ctypes.data + source_shift, length]] * 2)
            streaming.copy_rows(rows)
            assert np.array_equal(target[start : start + length], source[source_shift : source_shift + length])
            assert np.all(target[:start] == UNTOUCHED)
            assert np.all(target[start + length :] == UNTOUCHED)
