"""The arena against a set of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.p2p.receive.arena import ALIGNMENT, Arena, padded

SIZES = st.lists(st.integers(0, 5 * ALIGNMENT), min_size=1, max_size=4)


@given(steps=st.lists(st.one_of(SIZES, st.integers(0, 100)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps: list[list[int] | int]) -> None:
    arena = Arena(20 * ALIGNMENT + 7)
    lent: list[tuple[tuple[int, ...], list[int]]] = []
    for step in steps:
        if isinstance(step, int):
            if lent:
                arena.release(lent.pop(step % len(lent))[0])
        else:
            offsets = arena.reserve(step)
            if offsets is None:
                used = sum(padded(size) for _, sizes in lent for size in sizes)
                free = arena.nbytes - used
                assert len(lent) > 0 or not arena.could_ever(step)
                assert free < sum(map(padded, step)) or len(lent) > 0
            else:
                lent.append((offsets, step))
        units = [
            unit
            for offsets, sizes in lent
            for offset, size in zip(offsets, sizes, strict=True)
            for unit in range(offset // ALIGNMENT, (offset + padded(size)) // ALIGNMENT)
        ]
        assert len(units) == len(set(units))
        assert all(0 <= unit < 20 for unit in units)
        assert arena.free_bytes == arena.nbytes - len(units) * ALIGNMENT
    for offsets, _ in lent:
        arena.release(offsets)
    assert arena.reserve([arena.nbytes]) == (0,)


def test_all_or_nothing() -> None:
    arena = Arena(4 * ALIGNMENT)
    kept = arena.reserve([ALIGNMENT] * 4)
    assert kept is not None
    arena.release([kept[0], kept[2]])
    assert arena.reserve([ALIGNMENT, 2 * ALIGNMENT]) is None
    assert arena.reserve([2 * ALIGNMENT]) is None  # there are two, but apart
    assert arena.free_bytes == 2 * ALIGNMENT
    assert arena.reserve([1, 1]) == (kept[0], kept[2])


def test_none() -> None:
    assert Arena(0).reserve([0]) is None
    assert not Arena(ALIGNMENT).could_ever([ALIGNMENT, 0])
