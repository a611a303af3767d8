"""Plans against the oracle, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copy_layouts import CASES, UNTOUCHED, Case, layout_of, make_case
from kvferry.copy import oracle, plan_batches, plan_runs
from kvferry.copy.oracle import Bytes
from kvferry.copy.plan import Runs, split_runs
from kvferry.copy.steps import PIECE_BYTES, cut_steps
from kvferry.errors import BlockIdError
from kvferry.layout import Plane


def follow(runs: Runs, memory: Bytes, *, gather: bool) -> None:
    """Do the runs within one array, its indices taken for addresses."""
    for paged, flat, nbytes, _ in zip(*(column.tolist() for column in runs), strict=True):
        if gather:
            memory[flat : flat + nbytes] = memory[paged : paged + nbytes]
        else:
            memory[paged : paged + nbytes] = memory[flat : flat + nbytes]


def arranged(case: Case, seed: int) -> tuple[Bytes, list[int], list[int]]:
    """One array that holds the storages, then the chunks in shuffled places: it, the bases, the chunks' addresses."""
    bases = np.cumsum([7, *case.storage_bytes])[:-1].tolist()
    end = 7 + sum(case.storage_bytes)
    order = np.random.default_rng(seed).permutation(case.num_chunks)
    flats = [end + 3 + int(place) * (case.chunk_bytes + seed % 3) for place in order]
    return np.full(max(flats) + case.chunk_bytes, UNTOUCHED, dtype=np.uint8), bases, flats


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_gather_is_the_oracles(name: str, seed: int) -> None:
    case = CASES[name]
    memory, bases, flats = arranged(case, seed)
    storages = case.random_storages(seed)
    for base, storage in zip(bases, storages, strict=True):
        memory[base : base + len(storage)] = storage
    follow(plan_runs(case.layout, bases, case.ids, flats), memory, gather=True)
    expected = oracle.gather(case.layout, storages, case.ids, num_chunks=case.num_chunks)
    for flat, chunk in zip(flats, expected, strict=True):
        assert np.array_equal(memory[flat : flat + case.chunk_bytes], chunk)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("skip_share", [0, 0.3, 0.5, 1])
def test_scatter_is_the_oracles(name: str, skip_share: float) -> None:
    case = CASES[name]
    skip = int(skip_share * len(case.ids))
    memory, bases, flats = arranged(case, 1)
    chunks = case.random_chunks(2)
    for flat, chunk in zip(flats, chunks, strict=True):
        memory[flat : flat + case.chunk_bytes] = chunk
    expected = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    oracle.scatter(case.layout, expected, case.ids, chunks, skip)
    follow(plan_runs(case.layout, bases, case.ids, flats, skip), memory, gather=False)
    for base, storage in zip(bases, expected, strict=True):
        assert np.array_equal(memory[base : base + len(storage)], storage)


def test_runs_are_ordered_by_flat_and_joined() -> None:
    layout = layout_of([Plane(0, 0, 8, 8), Plane(0, 800, 8, 8)], 100)
    runs = plan_runs(layout, [1000], [4, 5, 6, 7, 0, 2], [5048, 5000, 5100])
    assert runs.flat.tolist() == [5000, 5016, 5048, 5064, 5100, 5108, 5116, 5124]
    assert runs.paged.tolist() == [1048, 1848, 1032, 1832, 1000, 1016, 1800, 1816]
    assert runs.nbytes.tolist() == [16, 16, 16, 16, 8, 8, 8, 8]
    whole = plan_runs(layout_of([Plane(0, 0, 8, 8)], 100), [0], list(range(100)), [5000 + 80 * at for at in range(10)])
    assert whole.flat.tolist() == [5000 + 80 * at for at in range(10)], "joined within a chunk, never across"
    assert whole.nbytes.tolist() == [80] * 10
    assert whole.chunk.tolist() == list(range(10))


@pytest.mark.parametrize("skip", [0, 5])
def test_batches_are_the_whole_plan_in_parts(skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["pages_padded"]
    _, bases, flats = arranged(case, 0)
    whole = plan_runs(case.layout, bases, case.ids, flats, skip)
    monkeypatch.setattr("kvferry.copy.plan._BATCH_BYTES", 3 * case.chunk_bytes)
    batches = list(plan_batches(case.layout, bases, case.ids, flats, skip))
    assert len(batches) == 1 + (case.num_chunks - 1) // 3
    for column, parts in zip(whole, zip(*batches, strict=True), strict=True):
        assert np.array_equal(column, np.concatenate(parts))
    with pytest.raises(BlockIdError):
        plan_batches(case.layout, bases, [*case.ids[:-1], -1], flats)


def test_nothing_to_copy() -> None:
    case = CASES["pages_dense"]
    assert plan_runs(case.layout, [0, 0], [], []).nbytes.tolist() == []
    memory, bases, flats = arranged(case, 0)
    assert plan_runs(case.layout, bases, case.ids, flats, len(case.ids)).nbytes.tolist() == []
    assert memory[0] == UNTOUCHED


@pytest.mark.parametrize(
    ("ids", "chunks", "skip", "text"),
    [
        ([0, 1, 4], 1, 0, "block id 4 is outside the cache, which has blocks 0 to 3"),
        ([0, 1, -1], 1, 0, "block id -1 is outside"),
        ([0, 1, 2], 2, 0, "3 block ids for 2 chunks"),
        ([], 2, 0, "0 block ids for 2 chunks"),
        ([0], 0, 0, "1 block ids for 0 chunks"),
        ([0, 1, 1], 1, 0, "block id 1 is named twice"),
        ([0, 1], 1, 3, "3 blocks to skip of 2"),
        ([0, 1], 1, -1, "-1 blocks to skip of 2"),
    ],
)
def test_block_ids_that_are_refused(ids: list[int], chunks: int, skip: int, text: str) -> None:
    layout = layout_of([Plane(0, 0, 8, 8)], 4)
    with pytest.raises(BlockIdError, match=text):
        plan_runs(layout, [0], ids, [100 * at for at in range(1, chunks + 1)], skip)


def test_skipped_ids_may_be_anything() -> None:
    layout = layout_of([Plane(0, 0, 8, 8)], 4)
    assert plan_runs(layout, [0], [-1, -1, 99, 3], [100], 3).paged.tolist() == [24]


def test_overlapping_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        plan_runs(layout_of([Plane(0, 0, 8, 8)], 4), [0], [0, 1, 2, 3], [100, 115])


def test_blocks_of_many_tokens_and_tails() -> None:
    """68 blocks with 8 a chunk: 8 chunks are kept, and the other 4 blocks are the caller's to leave out."""
    case = make_case([64], num_blocks=68, per_chunk=8, num_chunks=8)
    assert len(case.ids) == 64


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * PIECE_BYTES), max_size=30), st.integers(1, 2 * PIECE_BYTES))
def test_split_runs_keeps_every_byte(sizes: list[int], limit: int) -> None:
    nbytes = np.array(sizes, dtype=np.int64)
    runs = Runs(np.cumsum(nbytes) * 2, np.cumsum(nbytes) * 3, nbytes, np.arange(len(nbytes)))
    pieces = split_runs(runs, limit)
    assert pieces.nbytes.max(initial=1) <= limit
    joined: list[tuple[int, int, int, int]] = []
    for paged, flat, size, chunk in zip(*(column.tolist() for column in pieces), strict=True):
        before = joined[-1] if joined else (0, 0, 0, -1)
        if before[3] == chunk:
            assert (before[0] + before[2], before[1] + before[2]) == (paged, flat)
            joined[-1] = (before[0], before[1], before[2] + size, chunk)
        else:
            joined.append((paged, flat, size, chunk))
    assert joined == list(zip(*(column.tolist() for column in runs), strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3 * PIECE_BYTES), st.booleans()), max_size=40),
    st.integers(PIECE_BYTES // 4, 5 * PIECE_BYTES),
    st.integers(1, 8),
    st.booleans(),
)
def test_steps_hold_every_byte_in_order(
    sizes: list[tuple[int, bool]], buffer_bytes: int, spare: int, growing: bool
) -> None:
    nbytes = np.array([size for size, _ in sizes], dtype=np.int64)
    gaps = np.array([10 * gap for _, gap in sizes], dtype=np.int64)
    flat = np.cumsum(nbytes + gaps) - nbytes
    paged = np.cumsum(nbytes) * 2
    max_pieces = spare + -(-buffer_bytes // PIECE_BYTES)
    chunk = np.arange(len(sizes)) // 2
    whole = Runs(paged, flat, nbytes, chunk)
    batches = [Runs(*(column[at : at + 9] for column in whole)) for at in range(0, len(sizes), 9)]
    moved: list[tuple[int, int]] = []
    for step in cut_steps(batches, buffer_bytes=buffer_bytes, max_pieces=max_pieces, growing=growing):
        assert 0 < len(step.staged) <= max_pieces
        assert int(step.pieces.nbytes.sum()) <= buffer_bytes
        at: dict[int, int] = {}
        for flat_at, staged, size in step.ranges:
            inside = (flat >= flat_at) & (flat < flat_at + size)
            assert len(set(chunk[inside].tolist())) <= 1
            at.update(zip(range(staged, staged + size), range(flat_at, flat_at + size), strict=True))
        for source, staged, size in zip(
            step.pieces.paged.tolist(), step.staged.tolist(), step.pieces.nbytes.tolist(), strict=True
        ):
            assert at[staged] + size - 1 == at[staged + size - 1]
            moved.append((source, at[staged]))
            moved.append((source + size - 1, at[staged + size - 1]))
    places = {
        (p + k, f + k)
        for p, f, n in zip(paged.tolist(), flat.tolist(), nbytes.tolist(), strict=True)
        for k in (0, n - 1)
    }
    assert places <= set(moved)
    assert len(sizes) == 0 or moved[-1] == (int(paged[-1] + nbytes[-1] - 1), int(flat[-1] + nbytes[-1] - 1))
