"""What is on disk after a restart is found again, as far as it is of use; what is gone is gone from disk, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.errors import TierUnavailableError
from kvferry.server.tiers.disk import file_bytes
from tier_bench import CHUNK, SPACE, TierBench, keys, name

Make = Callable[..., TierBench]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches, and closes them."""
    made: list[TierBench] = []

    def make_one(num_chunks: int = 16, **arguments: object) -> TierBench:
        bench = TierBench(num_chunks, **arguments)  # type: ignore[arg-type]
        made.append(bench)
        return bench

    yield make_one
    for bench in made:
        bench.close()


def filled(make: Make, *prompts: str) -> MemoryTier:
    """A disk that has these prompts, stored in this order."""
    disk = MemoryTier()
    bench = make(disk=disk)
    for prompt in prompts:
        bench.store(prompt)
    bench.settle()
    return disk


def restarted(make: Make, disk: MemoryTier, **arguments: object) -> TierBench:
    """Another server on the same disk, that has not looked at it yet."""
    again = MemoryTier()
    again.chunks = disk.chunks
    again.stop("scan")
    return make(disk=again, **arguments)


def go_on(bench: TierBench) -> None:
    assert bench.disk is not None
    bench.disk.let_go()
    bench.settle()


def test_what_was_stored_is_found_again(make: Make) -> None:
    bench = restarted(make, filled(make, "abc", "xy"))
    assert bench.load("abc") == 0
    go_on(bench)
    assert (bench.load("abc"), bench.load("xyz")) == (3, 2)
    assert bench.values()["disk_used_bytes"] == 5 * file_bytes(CHUNK)


def test_what_is_stored_meanwhile_waits_for_the_scan_and_is_written_only_if_it_is_new(make: Make) -> None:
    bench = restarted(make, filled(make, "abc"))
    bench.store("abcd")
    assert len(bench.index.dirty) == 4
    go_on(bench)
    assert not bench.index.dirty
    assert bench.values()["disk_chunks_written"] == 1
    assert bench.values()["disk_chunks"] == 4


def test_what_has_no_parent_any_more_is_removed(make: Make) -> None:
    disk = filled(make, "abcd", "xy")
    del disk.chunks[name("ab")]
    bench = restarted(make, disk)
    go_on(bench)
    assert set(disk.chunks) == {name("a"), name("x"), name("xy")}
    assert bench.values()["disk_chunks"] == 3


def test_a_disk_that_may_hold_less_now_keeps_what_was_used_last(make: Make) -> None:
    disk = filled(make, "ab", "xy")
    disk.mtimes = {name("a"): 5, name("ab"): 6, name("x"): 1, name("xy"): 2**63}  # a clock that jumped
    bench = restarted(make, disk, disk_bytes=3 * file_bytes(CHUNK))
    assert bench.disk is not None
    bench.disk.mtimes = disk.mtimes
    go_on(bench)
    assert set(disk.chunks) == {name("a"), name("x"), name("xy")}


def test_what_is_cleared_before_it_was_found_is_not_found(make: Make) -> None:
    disk = filled(make, "abc", "xyz")
    bench = restarted(make, disk)
    bench.tiers.clear(SPACE, keys("abc"), 1)
    go_on(bench)
    assert set(disk.chunks) == {name("a"), name("x"), name("xy"), name("xyz")}
    bench = restarted(make, disk)
    bench.tiers.clear(SPACE)
    bench.store("a")
    go_on(bench)
    assert set(disk.chunks) == {name("a")}


def test_what_another_server_left_is_found_once_the_folder_is_ones_own_again(make: Make) -> None:
    bench = make(disk=MemoryTier())
    assert bench.disk is not None
    bench.settle()
    bench.store("ab")
    bench.settle()
    bench.disk.chunks.update(filled(make, "abc", "xyz").chunks)
    bench.disk.failures["delete"] = TierUnavailableError("no")
    bench.index.discard_space(SPACE)
    bench.tiers.clear(SPACE, keys("xy"), 1)
    bench.tiers.clear(SPACE, keys("ab"), 1)
    bench.settle()
    bench.tick(2)
    bench.settle()
    assert bench.load("xyz") == 0
    bench.disk.num_opened += 1
    for _ in range(4):
        bench.tick(2)
        bench.store("nm")  # what is there already is not written again
        bench.settle()
    assert bench.load("xyz") == 3
    assert bench.load("ab") == 1  # cleared, though its file could not be deleted
    assert bench.values()["disk_chunks"] == 6
    assert bench.disk.log.count("scan") == 1 + 9  # twice in all


def test_what_a_search_could_not_look_into_is_counted(make: Make) -> None:
    disk = MemoryTier()
    disk.num_unlisted = 2
    bench = make(disk=disk)
    assert bench.values()["disk_unlisted"] == 0
    bench.settle()
    assert bench.values()["disk_unlisted"] == 2


def test_a_disk_that_cannot_be_listed_is_used_all_the_same(make: Make) -> None:
    disk = MemoryTier()
    disk.failures["scan"] = TierUnavailableError("no")
    bench = make(disk=disk)
    bench.store("ab")
    bench.settle()
    assert set(disk.chunks) == {name("a"), name("ab")}


def test_what_could_not_be_deleted_is_deleted_later(make: Make) -> None:
    bench = make(disk=MemoryTier(), disk_bytes=2 * file_bytes(CHUNK))
    assert bench.disk is not None
    bench.settle()
    bench.store("ab")
    bench.settle()
    bench.disk.failures["delete"] = TierUnavailableError("no")
    bench.store("x")
    bench.settle()
    assert set(bench.disk.chunks) == {name("a"), name("ab"), name("x")}
    bench.disk.failures.clear()
    bench.tick(11)
    bench.settle()
    assert set(bench.disk.chunks) == {name("a"), name("x")}


def test_a_name_is_not_written_while_it_is_deleted(make: Make) -> None:
    bench = make(disk=MemoryTier(num_threads=4), disk_bytes=2 * file_bytes(CHUNK))
    assert bench.disk is not None
    bench.settle()
    bench.store("ab")
    bench.settle()
    bench.disk.stop("delete")
    bench.store("x")
    bench.until(lambda: bench.values()["disk_queue"] == 1)  # only the deletion of "ab"
    bench.index.discard(bench.chunks("ab")[-1])
    bench.store("ab")
    assert [chunk.key for chunk in bench.index.dirty] == [keys("ab")[-1]]
    bench.store("a")
    assert bench.values()["disk_queue"] == 1
    bench.disk.let_go()
    bench.settle()
    assert set(bench.disk.chunks) == {name("a"), name("ab")}


def test_a_disk_that_hangs_while_it_is_read_at_the_start_works_once_it_answers(make: Make) -> None:
    disk = MemoryTier(num_threads=1)
    disk.stop("scan")
    bench = make(disk=disk)
    bench.step()
    disk.wait_inside(1)
    bench.tick(2)
    bench.store("ab")
    bench.tick(31)  # what it was asked meanwhile is taken back, so that nothing is in flight
    assert not bench.index.dirty
    disk.let_go()
    bench.tick()
    bench.settle()
    bench.tick(11)
    bench.settle()
    assert set(disk.chunks) == {name("a"), name("ab")}
