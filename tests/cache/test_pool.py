"""SlabPool: slots do not overlap, sizes do not starve each other, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache import SlabPool, slot_bytes

MIB = 1 << 20


def make_pool(*areas: tuple[int, int]) -> SlabPool:
    pool = SlabPool()
    for offset, nbytes in areas:
        pool.add_area(offset, nbytes)
    return pool


def test_a_pool_holds_exactly_what_fits() -> None:
    pool = make_pool((0, 4 * 65536))
    offsets = [pool.allocate(65536) for _ in range(4)]
    assert sorted(offset for offset in offsets if offset is not None) == [0, 65536, 131072, 196608]
    assert pool.allocate(65536) is None
    assert pool.used_bytes == pool.capacity_bytes


def test_an_empty_region_serves_another_size() -> None:
    pool = make_pool((0, 4 * MIB))
    small = [pool.allocate(MIB // 4) for _ in range(16)]
    assert None not in small
    assert pool.allocate(MIB) is None
    for offset in small[:4]:
        assert offset is not None
        pool.free(offset)
    assert pool.allocate(MIB) is not None


def test_a_slot_may_span_regions_but_not_areas() -> None:
    pool = make_pool((0, 16 * MIB), (32 * MIB, 16 * MIB))
    assert pool.fits(16 * MIB)
    assert not pool.fits(16 * MIB + 1)
    offsets = {pool.allocate(10 * MIB), pool.allocate(10 * MIB)}
    assert offsets == {0, 32 * MIB}
    assert pool.allocate(10 * MIB) is None


def test_without_areas_there_is_no_room() -> None:
    pool = SlabPool()
    assert not pool.fits(1)
    assert pool.allocate(1) is None


@pytest.mark.parametrize(("size", "num_fit"), [(17, 15), (20, 12), (33, 7), (40, 6), (100, 2), (16, 16), (256, 1)])
def test_as_many_slots_fit_as_the_bytes_allow(size: int, num_fit: int) -> None:
    pool = make_pool((0, 256 * MIB), (257 * MIB, 256 * MIB))
    offsets = []
    while (offset := pool.allocate(size * MIB)) is not None:
        offsets.append(offset)
    assert len(offsets) == 2 * num_fit
    assert pool.wasted_bytes == pool.capacity_bytes - pool.used_bytes
    for offset in offsets:
        pool.free(offset)
    assert pool.wasted_bytes == 0


def test_a_slab_is_no_larger_than_it_has_to_be() -> None:
    pool = make_pool((0, 256 * MIB))
    offset = pool.allocate(9 * MIB)  # 7 fit into 64 MiB, which wastes little; into 16 or 32 MiB fit 1 or 3
    assert offset is not None
    assert pool.wasted_bytes == MIB
    assert sum(pool.allocate(16 * MIB) is not None for _ in range(16)) == 12


def test_what_is_left_serves_though_it_does_not_suit() -> None:
    pool = make_pool((0, 256 * MIB))
    assert sum(pool.allocate(16 * MIB) is not None for _ in range(14)) == 14
    assert pool.allocate(17 * MIB) is not None
    assert pool.allocate(17 * MIB) is None


def test_runs_are_whole_and_take_turns() -> None:
    pool = make_pool((0, 16 * MIB))
    offsets = {pool.allocate(MIB // 4) for _ in range(64)}
    assert list(pool.runs(MIB // 4, 9)) == []  # all are of that size
    runs = [next(iter(pool.runs(3 * MIB, 1))) for _ in range(16)]  # all of it would suit best, but is too much
    assert sorted(len(run) for run in runs) == [16] * 16
    runs = [next(iter(pool.runs(2 * MIB, 1))) for _ in range(16)]
    assert sorted(len(run) for run in runs) == [8] * 16
    assert {slot for run in runs for slot in run} == offsets
    for slot in runs[0]:
        pool.free(slot)
    assert pool.allocate(2 * MIB) is not None


def test_freeing_twice_is_a_fault() -> None:
    pool = make_pool((0, MIB))
    offset = pool.allocate(1000)
    assert offset is not None
    pool.free(offset)
    with pytest.raises(KeyError):
        pool.free(offset)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_slot_holds_something(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_pool((0, MIB)).allocate(nbytes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1000, 65536, 300_000, 3 * MIB])), max_size=120))
def test_slots_never_overlap_and_all_comes_back(steps: list[tuple[bool, int]]) -> None:
    pool = make_pool((0, 8 * MIB), (9 * MIB, 3 * MIB))
    used: dict[int, int] = {}
    for take, nbytes in steps:
        if take or not used:
            offset = pool.allocate(nbytes)
            if offset is None:
                continue
            assert all(offset + slot_bytes(nbytes) <= o or o + slot_bytes(n) <= offset for o, n in used.items())
            assert offset + nbytes <= 8 * MIB or 9 * MIB <= offset <= offset + nbytes <= 12 * MIB
            used[offset] = nbytes
        else:
            offset, _ = used.popitem()
            pool.free(offset)
        assert pool.used_bytes == sum(map(slot_bytes, used.values()))
    for offset in used:
        pool.free(offset)
    assert pool.used_bytes == 0
    assert pool.allocate(8 * MIB) == 0
