"""What is stored goes down to the lower tiers, and stays in memory until it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.cache.tiers import ChunkName
from kvferry.errors import TierError, TierUnavailableError
from kvferry.server.tiers.disk import file_bytes
from tier_bench import CHUNK, SPACE, TierBench, bytes_of, keys, name

Make = Callable[..., TierBench]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches, and closes them."""
    made: list[TierBench] = []

    def make_one(num_chunks: int = 8, **arguments: object) -> TierBench:
        bench = TierBench(num_chunks, **arguments)  # type: ignore[arg-type]
        made.append(bench)
        return bench

    yield make_one
    for bench in made:
        bench.close()


def test_what_is_stored_is_written_once_parents_first(make: Make) -> None:
    bench = make(disk=MemoryTier(num_threads=1))
    assert bench.disk is not None
    bench.settle()
    assert bench.store("abc") == 3
    assert len(bench.index.dirty) == 3
    bench.settle()
    assert list(bench.disk.chunks) == [name("a"), name("ab"), name("abc")]
    assert not bench.index.dirty
    bench.store("abcd", start=3)
    bench.store("abcd")
    bench.settle()
    assert bench.disk.log.count("write") == 4
    assert bench.values()["disk_bytes_written"] == 4 * CHUNK


def test_a_dirty_chunk_is_not_evicted_and_the_store_is_skipped_and_counted(make: Make) -> None:
    bench = make(2, disk=MemoryTier())
    assert bench.disk is not None
    bench.settle()
    bench.disk.stop("write")
    assert bench.store("ab") == 2
    assert bench.store("x") == 0
    assert bench.index.counters.skipped_behind == 1
    bench.disk.let_go()
    bench.settle()
    assert bench.store("x") == 1
    assert bench.check("ab") == 1


def test_a_failed_write_is_given_up_with_all_below_it(make: Make) -> None:
    bench = make(disk=MemoryTier(num_threads=1))
    assert bench.disk is not None
    bench.settle()
    bench.disk.failures["write"] = TierError("bad luck")
    bench.store("ab")
    bench.settle()
    assert not bench.index.dirty
    assert bench.values()["disk_writes_failed"] == 2
    bench.disk.failures.clear()
    assert not bench.disk.chunks
    bench.store("abc")  # the next store of the chain writes what is missing, without waiting for the time to try again
    bench.settle()
    assert list(bench.disk.chunks) == [name("a"), name("ab"), name("abc")]


def test_a_child_whose_parent_could_not_be_written_leaves_no_file(make: Make) -> None:
    bench = make(disk=MemoryTier(num_threads=2))
    assert bench.disk is not None
    bench.settle()
    bench.disk.stop(name("a"))
    bench.store("ab")
    bench.until(lambda: bench.values()["disk_queue"] == 1)
    assert list(bench.disk.chunks) == [name("ab")]
    bench.disk.failures[name("a")] = TierError("bad luck")
    bench.disk.let_go()
    bench.settle()
    assert not bench.disk.chunks
    assert bench.values()["disk_chunks"] == bench.values()["disk_used_bytes"] == 0


def test_memory_that_is_being_written_is_kept_though_it_was_forgotten(make: Make) -> None:
    bench = make(2, disk=MemoryTier())
    assert bench.disk is not None
    bench.settle()
    bench.disk.stop("write")
    bench.store("ab")
    bench.disk.wait_inside(2)  # half of each has been read
    assert bench.index.discard(bench.chunks("a")[0]) == 2
    bench.tiers.clear(SPACE, keys("ab"), 0)
    assert bench.have("ab") == 0
    assert bench.store("xy") == 0  # their places are not free yet
    bench.disk.let_go("write")
    written: dict[ChunkName, bytes] = {}
    bench.disk.on_written = lambda meta, data: written.update({meta.name: data})
    bench.settle()
    assert written == {name("a"): bytes_of(keys("a")[0]), name("ab"): bytes_of(keys("ab")[1])}
    assert not bench.disk.chunks  # and they are gone from disk, too
    assert bench.store("xy") == 2


def test_a_full_index_lets_the_oldest_files_go(make: Make) -> None:
    bench = make(disk=MemoryTier(), disk_bytes=3 * file_bytes(CHUNK))
    assert bench.disk is not None
    bench.settle()
    for prompt in ("ab", "x", "ab", "y"):
        bench.store(prompt)
        bench.tiers.on_used(bench.chunks(prompt)[-1])
        bench.settle()
    assert set(bench.disk.chunks) == {name("a"), name("ab"), name("y")}
    bench.store("pqrst")  # longer than the disk: its head is kept
    bench.settle()
    assert set(bench.disk.chunks) == {name("p"), name("pq"), name("pqr")}
    assert bench.values()["disk_writes_skipped"] == 2


def test_a_full_disk_is_found_out_and_the_oldest_go(make: Make) -> None:
    bench = make(16, disk=MemoryTier(limit_bytes=3 * CHUNK + 100))
    assert bench.disk is not None
    bench.settle()
    for letter in "abcdefg":
        bench.store(letter)
        bench.settle()
    assert set(bench.disk.chunks) >= {name("g"), name("f")}
    assert not bench.index.dirty
    assert bench.values()["disk_writes_full"] > 0
    assert bench.values()["disk_capacity_bytes"] < 1 << 20
    bench.forget_memory()
    assert [bench.load(letter) for letter in "agf"] == [0, 1, 1]
    bench.disk.limit_bytes = 1 << 30
    bench.tick(2)
    bench.settle()
    for letter in "hijkl":
        bench.store(letter)
    bench.settle()
    assert set(bench.disk.chunks) >= {name(letter) for letter in "fghijkl"}


def test_a_disk_that_takes_nothing_at_all_gives_memory_free_again(make: Make) -> None:
    bench = make(2, disk=MemoryTier(limit_bytes=0))
    bench.settle()
    for letter in "abcde":
        assert bench.store(letter) == 1
        bench.settle()
    assert bench.values()["disk_chunks"] == bench.values()["disk_used_bytes"] == 0


def test_write_back_waits_until_memory_fills_and_then_takes_the_oldest(make: Make) -> None:
    bench = make(8, disk=MemoryTier(), write_back=True)
    assert bench.disk is not None
    bench.settle()
    for letter in "abcdef":
        bench.store(letter)
    assert bench.disk.log.count("write") == 0
    bench.store("g")
    bench.store("h")
    bench.until(lambda: bench.values()["disk_queue"] == 0)
    assert list(bench.disk.chunks) == [name("a"), name("b")]
    assert [bench.store(letter) for letter in "ij"] == [1, 1]
    bench.until(lambda: bench.values()["disk_queue"] == 0)
    assert [bench.load(letter) for letter in "abcdefghij"] == [1] * 10


def test_write_back_does_not_wait_where_leases_hold_the_rest(make: Make) -> None:
    bench = make(4, disk=MemoryTier(), write_back=True)
    bench.settle()
    bench.store("ab")
    bench.tiers.flush()
    bench.settle()
    bench.tiers._closing = False
    bench.index.pin(bench.chunks("ab")[-1])
    assert bench.store("xy") == 2  # half of the memory is dirty, the other half is held
    assert bench.store("z") == 0
    bench.tick()
    bench.until(lambda: bench.values()["disk_queue"] == 0)
    assert bench.store("z") == 1


def test_flush_writes_all(make: Make) -> None:
    bench = make(8, disk=MemoryTier(), write_back=True)
    assert bench.disk is not None
    bench.store("abc")
    assert not bench.tiers.idle
    bench.tiers.flush()
    bench.until(lambda: bench.tiers.idle)
    assert list(bench.disk.chunks) == [name("a"), name("ab"), name("abc")]


def test_a_tier_that_fails_again_and_again_is_left_alone_for_a_while(make: Make) -> None:
    bench = make(16, disk=MemoryTier(num_threads=1))
    assert bench.disk is not None
    bench.settle()
    bench.disk.failures["write"] = TierUnavailableError("the disk is gone")
    bench.disk.stop(*(name(letter) for letter in "abcdefgh"))
    for letter in "abcdefgh":
        bench.store(letter)
    for letter in "abc":
        bench.disk.let_go(name(letter))
        bench.step()
    bench.disk.let_go()
    bench.settle()
    assert bench.disk.log.count("write") == 4
    assert bench.values()["disk_paused"] == 1
    assert bench.values()["disk_writes_failed"] + bench.values()["disk_writes_skipped"] == 8
    assert not bench.index.dirty
    bench.store("i")
    assert not bench.index.dirty
    bench.disk.failures.clear()
    bench.tick(11)
    assert bench.values()["disk_paused"] == 0
    bench.settle()
    assert set(bench.disk.chunks) == {name(letter) for letter in "abcdefghi"}  # what memory has still is kept after all


def test_a_write_that_fails_for_ever_is_tried_again_and_again_but_not_often(make: Make) -> None:
    bench = make(16, disk=MemoryTier())
    assert bench.disk is not None
    bench.settle()
    bench.disk.failures[name("ab")] = TierUnavailableError("a bad block")
    bench.store("abc")
    for _ in range(20):
        bench.settle()
        bench.tick(1.1)
    bench.settle()
    assert list(bench.disk.chunks) == [name("a")]
    assert 2 <= bench.values()["disk_writes_failed"] <= 8
    bench.index.discard(bench.chunks("ab")[-1])
    bench.tick(11)
    bench.settle()
    assert bench.values()["disk_writes_failed"] <= 8


def test_a_tier_that_hangs_holds_only_what_its_threads_have(make: Make) -> None:
    bench = make(8, disk=MemoryTier(num_threads=2))
    assert bench.disk is not None
    bench.settle()
    bench.disk.stop("write")
    bench.store("abcdefgh")
    assert bench.store("x") == 0
    bench.tick()
    bench.disk.wait_inside(2)
    bench.tick(31)
    assert len(bench.index.dirty) == 2
    assert bench.values()["disk_paused"] == 1
    assert bench.store("x") == 1
    bench.disk.let_go()
    bench.settle()
    assert bench.values()["disk_paused"] == 0
    assert not bench.index.dirty
    assert set(bench.disk.chunks) == {name("a"), name("ab")}
    bench.tick(11)
    bench.settle()
    assert set(bench.disk.chunks) >= {name("abcdefg"[: end + 1]) for end in range(7)}


def test_a_remote_tier_gets_each_chunk_once_and_no_more_than_a_quarter_of_memory_waits_for_it(make: Make) -> None:
    bench = make(8, remote=MemoryTier("remote"))
    assert bench.remote is not None
    bench.remote.stop("write")
    bench.store("abcd")
    assert len(bench.index.dirty) == 2
    assert bench.values()["remote_writes_skipped"] == 2
    bench.remote.let_go()
    bench.settle()
    bench.store("abcde")
    bench.settle()
    assert bench.remote.log.count("write") == 4
    assert bench.values()["remote_writes_skipped"] == 3
    assert not bench.index.dirty


def test_a_chunk_is_dirty_until_the_slower_tier_has_it(make: Make) -> None:
    bench = make(8, disk=MemoryTier(), remote=MemoryTier("remote"))
    assert bench.disk is not None
    assert bench.remote is not None
    bench.remote.stop("write")
    bench.store("a")
    bench.until(lambda: bench.values()["disk_chunks_written"] == 1)
    assert len(bench.index.dirty) == 1
    bench.remote.let_go()
    bench.settle()
    assert not bench.index.dirty
    assert list(bench.remote.chunks) == list(bench.disk.chunks) == [name("a")]


def test_what_is_cleared_while_it_is_uploaded_does_not_stay_there(make: Make) -> None:
    bench = make(8, remote=MemoryTier("remote"))
    assert bench.remote is not None
    bench.remote.stop("write")
    bench.store("a")
    bench.remote.wait_inside(1)
    bench.index.discard(bench.chunks("a")[0])
    bench.tiers.clear(SPACE)
    bench.until(lambda: bench.values()["remote_deleting"] == 0)
    bench.remote.let_go()
    bench.settle()
    assert not bench.remote.chunks
    assert bench.load("a") == 0


def test_what_is_cleared_while_it_is_uploaded_and_stored_again_stays(make: Make) -> None:
    bench = make(8, remote=MemoryTier("remote"))
    assert bench.remote is not None
    bench.remote.stop("write")
    bench.store("a")
    bench.remote.wait_inside(1)
    bench.index.discard(bench.chunks("a")[0])
    bench.tiers.clear(SPACE, keys("a"), 0)
    bench.until(lambda: bench.values()["remote_deleting"] == 0)
    assert bench.store("a") == 1
    bench.remote.let_go()
    bench.settle()
    bench.forget_memory()
    assert bench.load("a") == 1
