"""A space is forgotten at once; its places come back bit by bit, and no sooner than nothing needs them."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvferry.cache import BytePool, Chunk, ChunkIndex, ChunkState, Quotas, SlabPool, Space
from kvferry.cache import index as index_module

A, B = Space("a", b"1" * 32), Space("b", b"2" * 32)
CHUNK = 65536


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


def sweep_all(index: ChunkIndex) -> None:
    while index.sweep(1.0):
        pass


def test_a_space_is_forgotten_at_once_and_swept_later() -> None:
    pool = BytePool(100)
    index = ChunkIndex(pool)
    chunks = fill(index, "abc", dirty=True)
    fill(index, "abx")
    fill(index, "xy", B)
    assert index.forget_space(A) == 4
    assert index.forget_space(A) == 0
    assert (hit(index, "abc"), hit(index, "xy", B), len(index), index.counters.discarded) == (0, 2, 2, 4)
    assert {(chunk.state, chunk.visible) for chunk in chunks} == {(ChunkState.GONE, False)}
    assert index.discard(chunks[0]) == 0
    assert pool.used_bytes == 6  # nothing was walked yet
    assert len(fill(index, "abc")) == 3  # beside the old ones
    sweep_all(index)
    assert (hit(index, "abc"), pool.used_bytes, len(index)) == (3, 5, 5)
    assert (len(index.dirty), index.dirty.nbytes) == (0, 0)


def test_a_sweep_takes_no_longer_than_it_may() -> None:
    pool = BytePool(50_000)
    index = ChunkIndex(pool)
    index.commit(index.reserve(A, [number.to_bytes(32, "big") for number in range(50_000)], 1).chunks)
    assert index.forget_space(A) == 50_000
    rounds = 0
    while index.sweep(0.0):
        rounds += 1
    assert rounds > 500  # what is done between two looks at the clock is little
    assert pool.used_bytes == 0


def test_a_large_tree_is_forgotten_at_once_and_swept_later() -> None:
    pool = BytePool(10_000)
    index = ChunkIndex(pool)
    chain = "s" + "a" * 300
    chunks = fill(index, chain, dirty=True)
    fill(index, "s" + "b" * 300)
    fill(index, "xy")
    pinned = fill(index, "s" + "c" * 10)[-1]
    index.pin(pinned)
    assert index.discard(chunks[200]) == 101
    assert index.sweeping
    assert 0 < pool.used_bytes - len(index) < 101  # some are left for later
    assert (hit(index, chain), {chunk.state for chunk in chunks[200:]}) == (200, {ChunkState.GONE})
    assert index.discard(chunks[0]) == 510  # the others, each once
    assert (hit(index, chain), hit(index, "xy"), len(index), index.counters.discarded) == (0, 2, 2, 611)
    assert len(fill(index, chain)) == 301  # beside the old ones
    sweep_all(index)
    assert (hit(index, chain), hit(index, "xy"), len(index), pool.used_bytes) == (301, 2, 303, 303 + 11)
    assert (len(index.dirty), index.dirty.nbytes) == (0, 0)
    index.unpin(pinned)
    assert pool.used_bytes == 303


def test_what_a_pin_needs_keeps_its_place_until_the_last_unpin() -> None:
    for order in ("unpin first", "sweep first"):
        pool = BytePool(100)
        index = ChunkIndex(pool)
        pinned = fill(index, "abc")[-1]
        fill(index, "abx")
        index.pin(pinned)
        index.forget_space(A)
        if order == "sweep first":
            sweep_all(index)
            assert pool.used_bytes == 3
        index.unpin(pinned)
        sweep_all(index)
        assert pool.used_bytes == 0


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sweep_first", [True, False])
def test_what_was_being_written_ends_with_its_writer(whole: bool, sweep_first: bool) -> None:
    freed: list[int] = []
    pool = BytePool(100, freed.append)
    index = ChunkIndex(pool)
    fill(index, "a")
    first, second = index.reserve(A, keys("abc"), 1).chunks, index.reserve(A, keys("abcde"), 1).chunks
    index.commit(second)  # it waits for the first
    third = index.reserve(A, keys("abcdefg"), 1).chunks
    assert index.forget_space(A) == 3
    if sweep_first:
        sweep_all(index)
        assert pool.used_bytes == 4
    for chunks in (first, third):
        if whole:
            assert index.commit(chunks) == []
        else:
            index.abort(chunks)
    sweep_all(index)
    assert (pool.used_bytes, len(freed), len(set(freed)), len(index)) == (0, 7, 7, 0)


def test_what_is_forgotten_goes_before_anything_is_evicted() -> None:
    index = ChunkIndex(BytePool(4))
    fill(index, "abc", A)
    fill(index, "x", B)
    index.forget_space(A)
    assert len(fill(index, "pqr", B)) == 3
    assert (index.counters.evicted, hit(index, "x", B)) == (0, 1)


def test_what_is_forgotten_counts_for_no_quota() -> None:
    index = ChunkIndex(BytePool(100), quotas=Quotas({"a": 4}))
    other = Space("a", b"3" * 32)
    fill(index, "x", other)
    fill(index, "abc", A)
    index.forget_space(A)
    assert len(fill(index, "pqr", other)) == 3
    assert (index.counters.evicted, hit(index, "x", other)) == (0, 1)


def test_what_is_forgotten_makes_room_for_another_size() -> None:
    pool = SlabPool()
    pool.add_area(0, 16 << 20)
    index = ChunkIndex(pool)
    index.commit(index.reserve(A, keys("a" * 200), CHUNK).chunks)
    index.commit(index.reserve(B, keys("b" * 56), CHUNK).chunks)
    index.forget_space(A)
    assert index.reserve(B, keys("c" * 4), 1 << 20).num_skipped == 0
    assert index.counters.evicted == 0


def test_forgetting_bit_by_bit_is_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two indices get the same, but one is swept now and then only."""
    for seed in range(60):
        chance = random.Random(seed)
        pools = BytePool(10_000), BytePool(10_000)
        indices = [ChunkIndex(pool) for pool in pools]
        writing: list[list[tuple[Chunk, ...]]] = []
        pinned: list[list[Chunk]] = []
        for _ in range(60):
            step, prompt, space = chance.randrange(8), "".join(chance.choices("ab", k=4)), chance.choice((A, B))
            if step <= 1:
                writing.append([index.reserve(space, keys(prompt), 1).chunks for index in indices])
            elif step <= 3 and writing:
                each, whole = writing.pop(chance.randrange(len(writing))), step == 3 or chance.random() < 0.7
                for index, chunks in zip(indices, each, strict=True):
                    index.commit(chunks, dirty=whole) if whole else index.abort(chunks)
                    index.clean(chunks)
            elif step == 4 and (last := indices[0].lookup(space, keys(prompt))) is not None:
                twin = indices[1].lookup(space, keys(prompt))
                assert twin is not None
                pinned.append([last, twin])
                for index, chunk in zip(indices, pinned[-1], strict=True):
                    index.pin(chunk)
            elif step == 5 and pinned:
                for index, chunk in zip(indices, pinned.pop(), strict=True):
                    index.unpin(chunk)
            elif step == 6:
                assert indices[0].forget_space(space) == indices[1].discard_space(space)
                for _ in range(chance.randrange(6)):
                    indices[0]._sweep_one()
            elif step == 7 and (root := indices[0].find(space, keys(prompt)[1])) is not None:
                twin = indices[1].find(space, keys(prompt)[1])
                assert twin is not None
                with monkeypatch.context() as patch:
                    patch.setattr(index_module, "SWEPT_AT_ONCE", chance.randrange(2))
                    num_whole = indices[0].discard(root)
                assert num_whole == indices[1].discard(twin)
            assert len(indices[0]) == len(indices[1])
            found = [index.lookup(space, keys(prompt)) for index in indices]
            assert [chunk and chunk.depth for chunk in found] == [found[0] and found[0].depth] * 2
        sweep_all(indices[0])
        assert pools[0].used_bytes == pools[1].used_bytes
        for index, number in ((index, number) for number, index in enumerate(indices)):
            for each in writing:
                index.abort(each[number])
            for pair in pinned:
                index.unpin(pair[number])
            index.forget_space(A)
            index.forget_space(B)
            sweep_all(index)
        assert (pools[0].used_bytes, pools[1].used_bytes) == (0, 0)
