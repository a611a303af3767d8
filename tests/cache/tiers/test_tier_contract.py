"""What every tier does, shown on each: a folder of one server, a folder that hosts share, a bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cache.tiers.chunks import MIB, PAGE, chain_of, filled, is_whole, memory, meta_of, write
from cache.tiers.conftest import S3
from kvferry.cache.tiers import DiskTier, Tier
from kvferry.cache.tiers.format import digest_of
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.errors import ChunkCorruptError, ChunkMissingError


@pytest.fixture(params=["disk", "file", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier
    if request.param == "disk":
        made = DiskTier(tmp_path)
    elif request.param == "file":
        made = RemoteTier(f"file://{tmp_path}/with%20space")
    else:
        s3: S3 = request.getfixturevalue("s3")
        made = s3.tier()
    yield made
    made.close()
    made.close()


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, MIB, 5 * MIB + 4321])
@pytest.mark.parametrize("shift", [0, 256])
def test_bytes_come_back(tier: Tier, nbytes: int, shift: int) -> None:
    meta = meta_of(1, nbytes)
    data = filled("these", nbytes, shift=shift)
    tier.write(meta, data.toreadonly())
    for into in (memory(nbytes), memory(nbytes, shift=1)):
        tier.read(meta, into)
        assert into == data


def test_a_second_write_replaces_the_first(tier: Tier) -> None:
    meta = meta_of(1, 100)
    tier.write(meta, filled("old", 100))
    tier.write(replace(meta, nbytes=50), filled("new", 50))
    into = memory(50)
    tier.read(replace(meta, nbytes=50), into)
    assert into == filled("new", 50)


def test_what_is_not_there_is_missing(tier: Tier) -> None:
    with pytest.raises(ChunkMissingError):
        is_whole(tier, meta_of(1, 100))
    write(tier, meta_of(1, 100))
    with pytest.raises(ChunkMissingError):
        is_whole(tier, meta_of(1, 100, namespace=1))
    with pytest.raises(ChunkMissingError):
        is_whole(tier, meta_of(2, 100))


@pytest.mark.parametrize("nbytes", [99, 101])
def test_another_length_is_corrupt(tier: Tier, nbytes: int) -> None:
    write(tier, meta_of(1, 100))
    with pytest.raises(ChunkCorruptError, match="bytes instead of"):
        tier.read(meta_of(1, nbytes), memory(nbytes))


def test_another_place_in_the_chain_or_owner_is_corrupt(tier: Tier) -> None:
    meta = meta_of(2, 100, parent=1, depth=2)
    write(tier, meta)
    for other in (replace(meta, depth=3), replace(meta, parent=b"x" * 32), replace(meta, tenant="uid:1001")):
        with pytest.raises(ChunkCorruptError, match="another chunk is there"):
            tier.read(other, memory(100))
    assert is_whole(tier, meta)


def test_checksums_go_down_and_come_up(tier: Tier) -> None:
    meta = meta_of(1, 100)
    data = filled("these", 100)
    tier.write(meta, data)
    assert tier.read(meta, memory(100)) == digest_of(data)
    tier.write(meta, data, digest_of(data))
    assert tier.read(meta, memory(100)) == digest_of(data)
    tier.write(meta, data, digest_of(b"what it was before it was damaged in memory"))
    with pytest.raises(ChunkCorruptError, match="checksum"):
        tier.read(meta, memory(100))


def test_memory_of_another_length_is_a_fault_of_the_caller(tier: Tier) -> None:
    with pytest.raises(ValueError, match="99 bytes"):
        tier.write(meta_of(1, 100), memory(99))
    with pytest.raises(ValueError, match="99 bytes"):
        tier.read(meta_of(1, 100), memory(99))


@pytest.mark.parametrize("present", [0, 1, 5, 9])
def test_find_counts_from_the_first_on(tier: Tier, present: int) -> None:
    chain = chain_of(3, 9, 10)
    for meta in chain[:present]:
        write(tier, meta)
    names = [meta.name for meta in chain]
    assert [tier.find(names[:length]) for length in range(10)] == [min(present, length) for length in range(10)]


def test_find_stops_before_a_first_chunk_that_is_gone(tier: Tier) -> None:
    chain = chain_of(3, 4, 10)
    for meta in chain[1:]:
        write(tier, meta)
    assert tier.find([meta.name for meta in chain]) == 0


def test_delete_takes_what_it_names_and_nothing_else(tier: Tier) -> None:
    chain = chain_of(3, 30, 10)
    for meta in chain:
        write(tier, meta)
    tier.delete([])
    tier.delete([meta_of(77, 1).name, *[meta.name for meta in chain[10:]], meta_of(78, 1).name])
    for meta in chain[10:]:
        with pytest.raises(ChunkMissingError):
            is_whole(tier, meta)
    assert all(is_whole(tier, meta) for meta in chain[:10])
    tier.delete([meta.name for meta in chain])
    assert tier.find([chain[0].name]) == 0


def test_threads_may_call_at_once(tier: Tier) -> None:
    """All begin in namespaces that are new, and one chunk is everybody's."""
    shared = meta_of(1, 70_000, namespace=99)
    barrier = threading.Barrier(4)

    def run(number: int) -> int:
        chain = chain_of(number % 2, 8, 20_000 + number)[number // 2 :: 2]
        barrier.wait(20)
        for meta in chain:
            write(tier, shared)
            write(tier, meta)
            assert is_whole(tier, shared)
        tier.delete([chain[0].name])
        assert all(is_whole(tier, meta) for meta in chain[1:])
        return len(chain)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4), timeout=50)) == [4, 4, 4, 4]
