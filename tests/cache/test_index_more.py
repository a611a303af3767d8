"""ChunkIndex beyond one memory: quotas of tenants, chunks that lower tiers do not have yet, forgetting, restoring."""

from __future__ import annotations

import hashlib

from kvferry.cache import BytePool, Chunk, ChunkIndex, ChunkState, Quotas, Space

A, B = Space("a", b"1" * 32), Space("b", b"2" * 32)


def make_index(capacity: int, **limits: int) -> tuple[BytePool, ChunkIndex]:
    """A pool in which every chunk takes one byte."""
    pool = BytePool(capacity)
    return pool, ChunkIndex(pool, quotas=Quotas(limits))


def keys(prompt: str) -> list[bytes]:
    """One key a letter; prompts that start alike share keys."""
    return [hashlib.sha256(prompt[: end + 1].encode()).digest() for end in range(len(prompt))]


def fill(index: ChunkIndex, prompt: str, space: Space = A, *, dirty: bool = False) -> tuple[Chunk, ...]:
    chunks = index.reserve(space, keys(prompt), 1).chunks
    index.commit(chunks, dirty=dirty)
    return chunks


def hit(index: ChunkIndex, prompt: str, space: Space = A) -> int:
    last = index.lookup(space, keys(prompt))
    return 0 if last is None else last.depth


def test_a_tenant_at_its_quota_evicts_only_its_own() -> None:
    _, index = make_index(10, a=3)
    fill(index, "xyz", B)
    fill(index, "abc")
    assert len(fill(index, "de")) == 2
    assert (hit(index, "xyz", B), hit(index, "abc"), hit(index, "de")) == (3, 1, 2)
    reservation = index.reserve(A, keys("pqrs"), 1)
    assert (len(reservation.chunks), reservation.num_skipped) == (3, 1)
    assert (index.counters.skipped_quota, index.counters.skipped_full) == (1, 0)


def test_without_a_quota_the_oldest_chunk_of_all_tenants_goes() -> None:
    _, index = make_index(4, a=4)
    fill(index, "ab", A)
    fill(index, "xy", B)
    fill(index, "z", B)
    assert (hit(index, "ab", A), hit(index, "xy", B), hit(index, "z", B)) == (1, 2, 1)


def test_a_star_is_the_quota_of_the_others() -> None:
    quotas = Quotas({"a": 7, "*": 3})
    assert (quotas.limit("a"), quotas.limit("b"), Quotas({"a": 7}).limit("b")) == (7, 3, None)


def test_a_chunk_that_no_quota_could_hold_evicts_nothing() -> None:
    _, index = make_index(10, a=2)
    fill(index, "ab", dirty=True)
    assert index.reserve(A, keys("x"), 3).num_skipped == 1
    assert hit(index, "ab") == 2
    assert index.counters.skipped_quota == 1


def test_what_lower_tiers_do_not_have_stays_and_stores_are_skipped_for_that() -> None:
    _, index = make_index(3)
    chunks = fill(index, "abc", dirty=True)
    assert (list(index.dirty), index.dirty.nbytes) == (list(chunks), 3)
    assert fill(index, "x") == ()
    assert (index.counters.skipped_behind, index.counters.skipped_full) == (1, 0)
    index.clean(chunks[:2])
    assert fill(index, "x") == ()  # the last one is dirty still, and hangs from these
    index.clean(chunks)
    assert len(fill(index, "x")) == 1
    assert (hit(index, "abc"), index.dirty.nbytes) == (2, 0)


def test_a_chunk_that_is_forgotten_is_not_dirty() -> None:
    pool, index = make_index(3)
    chunks = fill(index, "abc", dirty=True)
    assert index.discard(chunks[1]) == 2
    assert (list(index.dirty), pool.used_bytes) == ([chunks[0]], 1)
    index.clean(chunks)
    assert not index.dirty


def test_what_is_forgotten_while_pinned_keeps_its_place_until_the_last_unpin() -> None:
    pool, index = make_index(6)
    fill(index, "abc")
    fill(index, "abx")
    pinned = index.lookup(A, keys("abc"))
    assert pinned is not None
    index.pin(pinned)
    index.pin(pinned)
    root = pinned.chain()[0]
    assert index.discard(root) == 4
    assert index.discard(root) == 0
    assert (hit(index, "abc"), hit(index, "abx"), len(index), pool.used_bytes) == (0, 0, 0, 3)
    assert fill(index, "abc") != ()  # beside the old ones, which are in use
    assert (hit(index, "abc"), pool.used_bytes) == (3, 6)
    assert not fill(index, "uvwxyz")[3:]
    index.unpin(pinned)
    assert pool.used_bytes == 6
    index.unpin(pinned)
    assert pool.used_bytes == 3


def test_the_living_parent_of_what_is_forgotten_stays_while_a_pin_needs_it() -> None:
    pool, index = make_index(2)
    fill(index, "ab")
    pinned = index.lookup(A, keys("ab"))
    assert pinned is not None
    index.pin(pinned)
    index.discard(pinned)
    assert hit(index, "ab") == 1
    assert fill(index, "x") == ()
    index.unpin(pinned)
    assert fill(index, "xy") != ()
    assert (hit(index, "ab"), pool.used_bytes) == (0, 2)


def test_what_is_written_below_a_forgotten_chunk_ends_with_its_writer() -> None:
    pool, index = make_index(4)
    (root,) = fill(index, "a")
    below = index.reserve(A, keys("abc"), 1).chunks
    assert index.discard(root) == 1
    assert pool.used_bytes == 2
    assert index.commit(below) == []
    assert pool.used_bytes == len(index) == 0
    assert [chunk.state for chunk in below] == [ChunkState.GONE] * 2


def test_a_space_is_forgotten_and_no_other() -> None:
    pool, index = make_index(9)
    fill(index, "abc")
    fill(index, "xy")
    fill(index, "ab", B)
    writing = index.reserve(A, keys("p"), 1).chunks
    assert index.discard_space(A) == 5
    assert index.discard_space(A) == 0
    assert (hit(index, "abc"), hit(index, "ab", B), pool.used_bytes) == (0, 2, 3)
    index.commit(writing)
    assert (hit(index, "p"), pool.used_bytes) == (0, 2)


def test_many_chunks_come_and_are_forgotten_and_no_queue_grows() -> None:
    _, index = make_index(1000)
    fill(index, "kept")
    for _ in range(500):
        index.discard(fill(index, "abc")[0])
    assert len(index._queues.share("a").leaves[0]) < 150
    assert index.evict_one()
    assert hit(index, "kept") == 3


def test_what_is_restored_goes_before_what_was_used_and_by_its_own_time() -> None:
    _, index = make_index(5)
    new = fill(index, "n")
    (a, b), (x, y) = keys("ab"), keys("xy")
    for key, parent, last_use in ((a, b"", 10), (x, b"", 20), (b, a, 31), (y, x, 30)):
        assert index.restore(A, key, parent, 1, last_use) is not None
    assert hit(index, "ab") == 2
    assert index.restore(A, keys("z")[0], b"", 1, 5) is None  # no room, and nothing goes for it
    assert index.restore(A, new[0].key, b"", 1, 5) is new[0]
    gone = [(index.evict_one(), hit(index, "ab"), hit(index, "xy"), hit(index, "n"))[1:] for _ in range(4)]
    assert gone == [(2, 1, 1), (2, 0, 1), (1, 0, 1), (0, 0, 1)]


def test_nothing_is_restored_below_what_is_not_there_or_not_whole() -> None:
    _, index = make_index(5)
    a, b, c = keys("abc")
    assert index.restore(A, b, a, 1, 1) is None
    writing = index.reserve(A, [a], 1).chunks
    assert index.restore(A, b, a, 1, 1) is None
    index.commit(writing)
    assert index.restore(A, b, a, 1, 1) is not None
    assert index.restore(A, c, b, 1, 1) is not None
    assert hit(index, "abc") == 3


def test_a_pool_that_shrinks_is_trimmed_and_tenants_over_their_quota_too() -> None:
    pool, index = make_index(10, b=3)
    fill(index, "abcd", A)
    key = b""
    for place, after in enumerate(keys("abcde")):
        assert index.restore(B, after, key, 1, place) is not None
        key = after
    assert index.trim() == 2  # what was restored is more than its tenant may have
    assert (hit(index, "abcd", A), hit(index, "abcde", B)) == (4, 3)
    pool.capacity_bytes = 2
    assert index.trim() == 5
    assert (hit(index, "abcd", A), hit(index, "abcde", B), pool.used_bytes) == (2, 0, 2)
