"""BytePool: numbers within a capacity that may change."""

from __future__ import annotations

import pytest

from kvferry.cache import BytePool


def test_numbers_are_handed_out_within_the_capacity_and_never_again() -> None:
    freed: list[int] = []
    pool = BytePool(10, freed.append)
    first, second = pool.allocate(6), pool.allocate(4)
    assert first is not None
    assert second is not None
    assert (pool.allocate(1), pool.used_bytes) == (None, 10)
    pool.free(first)
    assert (freed, pool.used_bytes) == ([first], 4)
    third = pool.allocate(6)
    assert third not in (None, first, second)
    with pytest.raises(KeyError):
        pool.free(first)


def test_the_capacity_may_fall_below_what_is_in_use() -> None:
    pool = BytePool(10)
    number = pool.allocate(8)
    assert number is not None
    pool.capacity_bytes = 5
    assert (pool.fits(6), pool.fits(5), pool.allocate(1)) == (False, True, None)
    pool.free(number)
    assert pool.allocate(5) is not None
    with pytest.raises(ValueError, match="at least one"):
        pool.allocate(0)
