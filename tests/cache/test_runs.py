"""Chunks of one size in a memory that is full of others: one run of those goes, the one not used for longest."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.cache import Chunk, ChunkIndex, SlabPool, Space

MIB = 1 << 20
OLD, NEW = Space("t", b"o" * 32), Space("u", b"n" * 32)
SIZE = MIB // 4
NUM = 64  # of which 4 have a region
PER_REGION = 4


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def make_full(areas: int = 1) -> tuple[ChunkIndex, list[Chunk]]:
    """A memory of 16 regions an area, full of chains of one chunk each; and these by their places."""
    pool = SlabPool()
    for number in range(areas):
        pool.add_area(number * 17 * MIB, 16 * MIB)
    index = ChunkIndex(pool)
    for number in range(NUM * areas):
        index.commit(index.reserve(OLD, [key(number)], SIZE).chunks)
    assert pool.used_bytes == pool.capacity_bytes
    chunks = [index.find(OLD, key(number)) for number in range(NUM * areas)]
    return index, sorted((chunk for chunk in chunks if chunk is not None), key=lambda chunk: chunk.offset)


def use(index: ChunkIndex, chunk: Chunk) -> None:
    index.pin(chunk)
    index.unpin(chunk)


def region_of(chunk: Chunk) -> int:
    return chunk.offset // MIB


def store(index: ChunkIndex, nbytes: int = MIB, number: int = 10_000) -> bool:
    return bool(index.commit(index.reserve(NEW, [key(number)], nbytes).chunks))


def gone(index: ChunkIndex, chunks: list[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if index.find(OLD, chunk.key) is None]


def test_the_run_that_was_not_used_for_longest_goes_and_no_other() -> None:
    index, chunks = make_full()
    for chunk in [*chunks[:20], *chunks[24:]]:  # the sixth region last, but for one of its chunks: so the others
        use(index, chunk)
    assert store(index)
    assert gone(index, chunks) == chunks[20:24]
    assert index.counters.evicted == PER_REGION


@pytest.mark.parametrize("areas", [1, 4])
def test_one_chunk_of_another_size_evicts_no_more_than_a_run(areas: int) -> None:
    index, chunks = make_full(areas)
    for number in range(len(chunks)):
        use(index, chunks[number * 37 % len(chunks)])
    assert store(index)
    assert index.counters.evicted == PER_REGION
    assert store(index, 4 * MIB, 10_001)
    assert index.counters.evicted <= 5 * PER_REGION


def test_where_no_run_can_go_none_of_it_goes() -> None:
    index, chunks = make_full()
    pinned = chunks[1::PER_REGION]
    for chunk in pinned:
        index.pin(chunk)
    assert not store(index)
    assert (index.counters.evicted, index.counters.skipped_full) == (0, 1)
    index.unpin(pinned[7])  # now it is the one used last, and the only one
    assert store(index)
    assert gone(index, chunks) == chunks[28:32]


def test_what_is_dirty_or_being_written_stays() -> None:
    index, chunks = make_full()
    for chunk in chunks[1::PER_REGION]:
        index.discard(chunk)
    dirty = [index.reserve(OLD, [key(number)], SIZE).chunks for number in range(1000, 1015)]
    for reserved in dirty[:7]:
        index.commit(reserved, dirty=True)
    held = {region_of(reserved[0]) for reserved in dirty}
    assert len(held) == 15
    assert store(index)
    assert {region_of(chunk) for chunk in gone(index, chunks) if chunk not in chunks[1::PER_REGION]} == (
        set(range(16)) - held
    )
    before = index.counters.evicted
    assert store(index, number=10_001)
    assert index.counters.evicted == before + 1  # the other one of its own size


def test_what_hangs_from_a_run_goes_with_it_or_keeps_it() -> None:
    pool = SlabPool()
    pool.add_area(0, 16 * MIB)
    index = ChunkIndex(pool)
    chain = index.reserve(OLD, [key(number) for number in range(NUM)], SIZE).chunks
    index.commit(chain)
    index.pin(chain[-1])
    assert not store(index)
    index.unpin(chain[-1])
    assert store(index)
    last = index.lookup(OLD, [key(number) for number in range(NUM)])
    assert (0 if last is None else last.depth) == len(index) - 1
    assert index.counters.evicted == NUM - len(index) + 1


def test_the_size_that_is_used_keeps_its_memory() -> None:
    """Once there is a run of the other size, it is its own leaves that go while the rest is used."""
    index, chunks = make_full()
    assert store(index, number=1)
    for number in range(2, 30):
        for chunk in chunks:
            if index.find(OLD, chunk.key) is chunk:
                use(index, chunk)
        assert store(index, number=number)
    assert len(gone(index, chunks)) == PER_REGION


def test_what_a_store_costs_is_bounded() -> None:
    """However many chunks hang from each run, no store looks at them all again and again."""
    pool = SlabPool()
    pool.add_area(0, 16 * MIB)
    index = ChunkIndex(pool)
    chain = index.reserve(OLD, [number.to_bytes(32, "big") for number in range(16 << 10)], 1024).chunks
    index.commit(chain)
    index.reserve(NEW, [key(number) for number in range(16)], 2048)
    assert index._runs._visits_left <= 0 or index.counters.evicted
    assert index._runs._visits_left > -64
