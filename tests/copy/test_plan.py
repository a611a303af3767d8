"""Plans against the oracle, what they refuse, and how they are cut into steps and strips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copy_layouts import CASES, UNTOUCHED, Case, layout_of, make_case
from kvferry.copy import ChunkMap, CopyPlan, oracle
from kvferry.copy.oracle import Bytes
from kvferry.copy.steps import ALIGNMENT, cut_steps
from kvferry.copy.strips import STRIP_BYTES
from kvferry.errors import BlockIdError
from kvferry.layout import Plane


def follow(plan: CopyPlan, memory: Bytes, *, to_flat: bool) -> None:
    """Do the copy within one array, its indices taken for addresses."""
    for target, source, nbytes in plan.rows(to_flat=to_flat).tolist():
        memory[target : target + nbytes] = memory[source : source + nbytes]


def planned(case: Case, bases: list[int], flats: list[int], skip: int = 0) -> CopyPlan:
    return ChunkMap(case.layout, bases, case.per_chunk).plan(case.ids, flats, skip)


def one_plane(blocks: int) -> ChunkMap:
    """Four blocks of 8 bytes at address 0."""
    return ChunkMap(layout_of([Plane(0, 0, 8, 8)], 4), [0], blocks)


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
    follow(planned(case, bases, flats), memory, to_flat=True)
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
    follow(planned(case, bases, flats, skip), memory, to_flat=False)
    for base, storage in zip(bases, expected, strict=True):
        assert np.array_equal(memory[base : base + len(storage)], storage)


@st.composite
def staged(draw: st.DrawFn) -> tuple[Case, int, int, int]:
    """A case with some planes; in how many stages, how many blocks are skipped, a seed."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    per_chunk, num_chunks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    case = make_case(lengths, num_blocks=16, per_chunk=per_chunk, num_chunks=num_chunks, pad=draw(st.integers(0, 3)))
    return case, draw(st.integers(1, len(lengths))), draw(st.integers(0, len(case.ids))), draw(st.integers(0, 5))


@given(staged())
def test_stages_together_are_the_whole_each_byte_once(drawn: tuple[Case, int, int, int]) -> None:
    case, num_stages, skip, seed = drawn
    memory, bases, flats = arranged(case, seed)
    plan = planned(case, bases, flats, skip)
    rows = [row for stage in range(num_stages) for row in plan.stage(stage, num_stages).rows(to_flat=False).tolist()]
    assert sorted(rows) == sorted(plan.rows(to_flat=False).tolist())
    taken = np.zeros(len(memory), dtype=np.int64)
    for target, _, nbytes in rows:
        taken[target : target + nbytes] += 1
    assert taken.max() <= 1
    assert taken.sum() == (len(case.ids) - skip) * case.layout.block_bytes


@given(staged())
def test_a_stage_is_its_share_of_the_planes(drawn: tuple[Case, int, int, int]) -> None:
    """By the definition: after `n` stages the planes before `n * P // S` are there in all blocks, and no others."""
    case, num_stages, skip, seed = drawn
    memory, bases, flats = arranged(case, seed)
    chunks = case.random_chunks(seed)
    for flat, chunk in zip(flats, chunks, strict=True):
        memory[flat : flat + case.chunk_bytes] = chunk
    plan = planned(case, bases, flats, skip)
    wanted = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.storage_bytes]
    oracle.scatter(case.layout, wanted, case.ids, chunks, skip)
    planes = case.layout.planes
    for stage in range(num_stages):
        part = plan.stage(stage, num_stages)
        follow(part.in_order(whole=False), memory, to_flat=False)
        for number, plane in enumerate(planes):
            comes = number < (stage + 1) * len(planes) // num_stages
            for block in case.ids[skip:]:
                place = plane.offset + block * plane.stride
                found = memory[bases[plane.storage] + place :][: plane.length]
                assert np.array_equal(found, wanted[plane.storage][place:][: plane.length]) or not comes
                assert comes or (found == UNTOUCHED).all()
    for base, storage in zip(bases, wanted, strict=True):
        assert np.array_equal(memory[base : base + len(storage)], storage)


@pytest.mark.parametrize(("number", "of"), [(-1, 2), (2, 2), (0, 3), (0, 0)])
def test_what_is_no_stage_is_refused(number: int, of: int) -> None:
    case = CASES["pages_padded"]  # two planes
    _, bases, flats = arranged(case, 0)
    with pytest.raises(ValueError, match=f"stage {number} of {of}, for 2 planes"):
        planned(case, bases, flats).stage(number, of)


def test_order_is_that_of_flat_addresses() -> None:
    plan = one_plane(1).plan([3, 0, 2, 1], [500, 100, 400, 300], 1).in_order(whole=True)
    assert plan.flats.tolist() == [100, 300, 400]
    assert plan.ids.tolist() == [[0], [1], [2]]


def test_parts_are_the_whole() -> None:
    case = CASES["pages_padded"]
    _, bases, flats = arranged(case, 0)
    whole = planned(case, bases, flats, 5)
    parts = [whole.part(start, start + 3).rows(to_flat=False) for start in range(0, case.num_chunks, 3)]
    assert np.array_equal(np.concatenate(parts), whole.rows(to_flat=False))


def test_nothing_to_copy() -> None:
    plan = one_plane(2).plan([], [])
    assert plan.in_order(whole=True).rows(to_flat=True).tolist() == []
    assert list(cut_steps(plan, buffer_bytes=64, growing=True)) == []
    skipped = one_plane(2).plan([0, 1, 2, 3], [100, 200], 4)
    assert skipped.in_order(whole=True).flats.tolist() == []


@pytest.mark.parametrize(
    ("ids", "chunks", "skip", "text"),
    [
        ([0, 4], 1, 0, "block id 4 is outside the cache, which has blocks 0 to 3"),
        ([0, 1 << 40], 1, 0, "block id 1099511627776 is outside"),
        ([0, -1], 1, 0, "block id -1 is outside"),
        ([0, 1, 2], 2, 0, "3 block ids for 2 chunks of 2 blocks"),
        ([], 2, 0, "0 block ids for 2 chunks"),
        ([0], 0, 0, "1 block ids for 0 chunks"),
        ([0, 1, 1, 2], 2, 0, "block id 1 is named twice"),
        ([0, 1], 1, 3, "3 blocks to skip of 2"),
        ([0, 1], 1, -1, "-1 blocks to skip of 2"),
    ],
)
def test_block_ids_that_are_refused(ids: list[int], chunks: int, skip: int, text: str) -> None:
    with pytest.raises(BlockIdError, match=text):
        one_plane(2).plan(ids, [100 * at for at in range(1, chunks + 1)], skip)


def test_skipped_ids_may_be_anything() -> None:
    plan = one_plane(2).plan([-1, 1 << 40, 99, 3], [100, 200], 3)
    assert plan.ids.tolist() == [[-1, -1], [-1, 3]]
    assert plan.rows(to_flat=False)[-1].tolist() == [24, 208, 8]
    assert plan.rows(to_flat=False)[:, 2].tolist() == [0, 0, 0, 8]


def test_only_whole_chunks_are_filled() -> None:
    plan = one_plane(2).plan([0, 1, 2, 3], [100, 200], 1)
    with pytest.raises(ValueError, match="filled as a whole"):
        plan.in_order(whole=True)


def test_overlapping_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks at 100 and 115 overlap"):
        one_plane(2).plan([0, 1, 2, 3], [115, 100]).in_order(whole=True)


def test_a_chunk_has_blocks() -> None:
    with pytest.raises(ValueError, match="chunks of 0 blocks"):
        one_plane(0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * STRIP_BYTES), min_size=1, max_size=20), st.integers(1, 4))
def test_strips_cover_the_planes(lengths: list[int], blocks: int) -> None:
    case = make_case(lengths, num_blocks=blocks, per_chunk=blocks, num_chunks=1)
    chunks = ChunkMap(case.layout, [1000, 1 << 40], blocks)
    strips = iter(chunks.strips.tolist())
    for start, stride, length, place in chunks.planes.T.tolist():
        done = 0
        while done < length:
            nbytes = min(STRIP_BYTES, length - done)
            assert next(strips) == [start + done, stride, nbytes, place + done, length]
            done += nbytes
    assert next(strips, None) is None


@settings(deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 400),
    st.integers(1, 20),
    st.integers(1, 8),
    st.booleans(),
)
def test_steps_hold_every_byte_in_order(
    gaps: list[bool], chunk_bytes: int, vectors: int, small: int, growing: bool
) -> None:
    chunks = ChunkMap(layout_of([Plane(0, 0, chunk_bytes, chunk_bytes)], len(gaps)), [0], 1)
    flats = np.cumsum([chunk_bytes + gap for gap in gaps])
    plan = chunks.plan(range(len(gaps)), flats)
    places: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.copy.steps._SMALL_BYTES", small * ALIGNMENT)
        steps = list(cut_steps(plan, buffer_bytes=vectors * ALIGNMENT, growing=growing))
    for step in steps:
        assert step.begin == len(places)
        assert step.begin % ALIGNMENT == 0
        assert 0 < step.end - step.begin <= vectors * ALIGNMENT
        for flat, at, nbytes in step.ranges:
            assert step.begin + at == len(places)
            places += range(flat, flat + nbytes)
        assert step.end == len(places)
    assert places == [place for flat in flats.tolist() for place in range(flat, flat + chunk_bytes)]
    sizes = [step.end - step.begin for step in steps]
    assert (sizes[:-1] if growing else sizes) == sorted(sizes[:-1] if growing else sizes, reverse=not growing)


def test_chunks_that_touch_are_one_range() -> None:
    plan = one_plane(1).plan([0, 1, 2, 3], [8, 16, 32, 40]).in_order(whole=True)
    (step,) = cut_steps(plan, buffer_bytes=1 << 20, growing=True)
    assert step.ranges == [(8, 0, 16), (32, 16, 16)]
