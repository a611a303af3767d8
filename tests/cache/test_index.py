"""ChunkIndex: visible once committed, leaves go first, pinned never, and no chain is ever broken."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.cache import ChunkIndex, IndexCounters, SlabPool, Space

CHUNK = 65536
NS = Space("t", b"n" * 32)
OTHER = Space("t", b"o" * 32)


def make_index(num_slots: int) -> ChunkIndex:
    pool = SlabPool()
    pool.add_area(0, num_slots * CHUNK)
    return ChunkIndex(pool)


def keys(prompt: str) -> list[bytes]:
    """One key a letter; prompts that start alike share keys."""
    return [hashlib.sha256(prompt[: end + 1].encode()).digest() for end in range(len(prompt))]


def fill(index: ChunkIndex, prompt: str, space: Space = NS) -> int:
    return len(index.commit(index.reserve(space, keys(prompt), CHUNK).chunks))


def hit(index: ChunkIndex, prompt: str, space: Space = NS) -> int:
    last = index.lookup(space, keys(prompt))
    return 0 if last is None else last.depth


def use(index: ChunkIndex, prompt: str) -> int:
    last = index.lookup(NS, keys(prompt))
    if last is None:
        return 0
    index.pin(last)
    index.unpin(last)
    return last.depth


def test_reserved_chunks_are_invisible() -> None:
    index = make_index(8)
    reservation = index.reserve(NS, keys("abc"), CHUNK)
    assert (len(reservation.chunks), reservation.first, reservation.num_skipped) == (3, 0, 0)
    assert hit(index, "abc") == 0
    assert index.commit(reservation.chunks) == list(reservation.chunks)
    assert hit(index, "abcd") == 3
    assert hit(index, "abc", OTHER) == 0


def test_aborted_chunks_leave_nothing() -> None:
    index = make_index(2)
    index.abort(index.reserve(NS, keys("ab"), CHUNK).chunks)
    assert hit(index, "ab") == 0
    assert len(index) == 0
    assert fill(index, "xy") == 2


def test_the_least_recently_used_chain_goes_deepest_first() -> None:
    index = make_index(6)
    fill(index, "abc")
    fill(index, "xyz")
    assert use(index, "abc") == 3
    fill(index, "k")
    assert (hit(index, "xyz"), hit(index, "abc")) == (2, 3)
    fill(index, "lm")
    assert (hit(index, "xyz"), hit(index, "abc"), hit(index, "k")) == (0, 3, 1)
    fill(index, "n")
    assert (hit(index, "abc"), hit(index, "k"), hit(index, "lm"), hit(index, "n")) == (2, 1, 2, 1)


def test_using_a_part_of_a_chain_keeps_that_part() -> None:
    index = make_index(6)
    fill(index, "abcd")
    fill(index, "xy")
    assert use(index, "ab") == 2
    fill(index, "pqr")
    assert (hit(index, "abcd"), hit(index, "xy")) == (2, 1)


def test_a_leaf_that_goes_hands_its_time_on_to_its_parent() -> None:
    index = make_index(6)
    fill(index, "ab")
    old = index.reserve(NS, keys("x"), CHUNK).chunks
    index.commit(old, dirty=True)  # it may not go, though it is older
    assert use(index, "ab") == 2
    assert index.evict_one()
    index.clean(old)
    assert index.evict_one()
    assert (hit(index, "a"), hit(index, "x")) == (1, 0)


def test_branches_keep_their_common_root() -> None:
    index = make_index(5)
    fill(index, "abc")
    fill(index, "abx")
    fill(index, "k")
    assert use(index, "abx") == 3
    fill(index, "l")
    assert (hit(index, "abc"), hit(index, "abx"), hit(index, "k")) == (2, 3, 1)
    fill(index, "m")
    assert (hit(index, "abx"), hit(index, "k")) == (3, 0)


def test_a_pinned_chain_stays_and_the_store_is_skipped() -> None:
    index = make_index(4)
    fill(index, "abcd")
    pinned = index.lookup(NS, keys("abcd"))
    assert pinned is not None
    assert [chunk.key for chunk in pinned.chain()] == keys("abcd")
    index.pin(pinned)
    reservation = index.reserve(NS, keys("wxyz"), CHUNK)
    assert (reservation.chunks, reservation.num_skipped) == ((), 4)
    assert index.counters.skipped_full == 4
    index.unpin(pinned)
    assert fill(index, "wxyz") == 4
    assert hit(index, "abcd") == 0


def test_a_pin_without_use_keeps_a_chain_and_makes_it_no_younger() -> None:
    index = make_index(2)
    fill(index, "a")
    fill(index, "b")
    last = index.lookup(NS, keys("a"))
    assert last is not None
    index.pin(last, use=False)
    fill(index, "c")
    assert (hit(index, "a"), hit(index, "b"), hit(index, "c")) == (1, 0, 1)
    index.unpin(last, use=False)
    fill(index, "d")
    assert (hit(index, "a"), hit(index, "c"), hit(index, "d")) == (0, 1, 1)


def test_what_is_no_store_is_not_counted_as_one_that_was_skipped() -> None:
    index = make_index(1)
    reservation = index.reserve(NS, keys("ab"), CHUNK, quiet=True)
    assert (len(reservation.chunks), reservation.num_skipped) == (1, 1)
    assert index.reserve(NS, keys("xy"), CHUNK, 1, quiet=True).num_skipped == 1
    assert index.counters == IndexCounters()


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    index = make_index(4)
    reservation = index.reserve(NS, keys("abcdef"), CHUNK)
    assert (len(reservation.chunks), reservation.num_skipped) == (4, 2)
    index.commit(reservation.chunks)
    assert hit(index, "abcdef") == 4


def test_a_limit_keeps_the_head_and_counts_the_rest() -> None:
    index = make_index(6)
    fill(index, "ab")
    reservation = index.reserve(NS, keys("abcdef"), CHUNK, limit=3)
    assert (reservation.first, len(reservation.chunks)) == (2, 3)
    assert (reservation.num_present, reservation.num_skipped) == (2, 1)
    assert (index.counters.skipped_share, index.counters.skipped_full) == (1, 0)
    index.commit(reservation.chunks)
    assert index.reserve(NS, keys("abcdef"), CHUNK, limit=0).num_skipped == 1
    assert index.reserve(NS, keys("abcde"), CHUNK, limit=0).num_present == 5


def test_a_slot_larger_than_the_pool_evicts_nothing() -> None:
    index = make_index(4)
    fill(index, "abcd")
    assert index.reserve(OTHER, keys("x"), 5 * CHUNK).num_skipped == 1
    assert hit(index, "abcd") == 4


def test_storing_again_writes_only_what_is_missing() -> None:
    index = make_index(8)
    fill(index, "ab")
    reservation = index.reserve(NS, keys("abcd"), CHUNK)
    assert (reservation.first, reservation.num_present, len(reservation.chunks)) == (2, 2, 2)


def test_what_another_store_is_writing_is_present_once_that_is_visible() -> None:
    index = make_index(8)
    first = index.reserve(NS, keys("ab"), CHUNK)
    second = index.reserve(NS, keys("abc"), CHUNK, 1)
    assert (second.first, len(second.chunks), second.num_skipped) == (2, 1, 0)
    assert index.commit(second.chunks) == []
    assert hit(index, "abc") == 0
    assert (second.num_present, second.num_stored, second.num_unsure) == (0, 0, 2)
    assert index.commit(first.chunks) == [*first.chunks, *second.chunks]
    assert hit(index, "abc") == 3
    assert (second.num_present, second.num_stored, second.num_unsure) == (1, 1, 0)


@pytest.mark.parametrize("commit_child_first", [True, False])
def test_a_child_goes_with_its_aborted_parent(commit_child_first: bool) -> None:
    index = make_index(3)
    parent = index.reserve(NS, keys("ab"), CHUNK)
    child = index.reserve(NS, keys("abc"), CHUNK)
    if commit_child_first:
        index.commit(child.chunks)
        index.abort(parent.chunks)
    else:
        index.abort(parent.chunks)
        assert index.commit(child.chunks) == []
    assert len(index) == 0
    assert fill(index, "xyz") == 3


def test_chunks_after_start_need_their_parents() -> None:
    index = make_index(8)
    reservation = index.reserve(NS, keys("abcd"), CHUNK, start=2)
    assert (reservation.chunks, reservation.num_skipped) == ((), 2)
    assert index.counters.skipped_orphan == 2
    fill(index, "ab")
    reservation = index.reserve(NS, keys("abcd"), CHUNK, start=2)
    assert (reservation.first, len(reservation.chunks), reservation.num_present) == (2, 2, 0)


def test_a_key_below_another_parent_is_a_miss() -> None:
    index = make_index(8)
    fill(index, "ab")
    a, b = keys("ab")
    assert index.lookup(NS, [b]) is None
    assert index.lookup(NS, [b, a]) is None
    found = index.lookup(NS, [a, a])
    assert found is not None
    assert found.key == a
    assert index.reserve(NS, [a, a], CHUNK).num_skipped == 1
    assert index.reserve(NS, [b], CHUNK).num_present == 1  # keys may begin anywhere
