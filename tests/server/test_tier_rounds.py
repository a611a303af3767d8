"""What the tiers need much of the loop's time for is done in pieces; a scan that hangs holds nothing up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.errors import TierUnavailableError
from kvferry.server.net.rounds import Budget
from kvferry.server.tiers.disk import file_bytes
from tier_bench import CHUNK, TierBench, name

LETTERS = "abcdefgh"


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round has time for more than one step of anything."""

    def spend(self: Budget, step: Callable[[], bool]) -> bool:
        return step()

    monkeypatch.setattr(Budget, "spend", spend)


def more(bench: TierBench) -> bool:
    """Whether there is something for a later round."""
    return bench.tiers.more


def test_a_budget_ends_what_does_not_end_by_itself() -> None:
    steps: list[int] = []

    def step() -> bool:
        steps.append(1)
        return len(steps) < 3

    assert not Budget(1000).spend(step)
    assert len(steps) == 3
    steps.clear()
    assert Budget(0).spend(step)
    assert len(steps) == 1
    assert Budget(0.01).spend(lambda: True)


@pytest.mark.usefixtures("one_step")
def test_the_end_of_a_scan_a_pause_and_its_end_go_on_in_later_rounds() -> None:
    disk = MemoryTier(num_threads=1)
    disk.stop("scan")
    bench = TierBench(16, disk=disk)
    try:
        for letter in LETTERS:
            bench.store(letter)
        disk.let_go()
        disk.stop("write")
        while bench.values()["disk_scanning"]:
            bench.step()
        assert more(bench)
        assert bench.values()["disk_queue"] <= 2
        while bench.tiers.more:
            bench.tick()
        assert bench.values()["disk_queue"] >= len(LETTERS)
        disk.failures["write"] = TierUnavailableError("gone")
        disk.stop(name("d"))
        disk.let_go("write")
        bench.until(lambda: bench.values()["disk_paused"] == 1)
        assert more(bench)
        disk.let_go()
        bench.settle()
        disk.failures.clear()
        bench.tick(11)
        assert more(bench)
        bench.settle()
        assert set(disk.chunks) == {name(letter) for letter in LETTERS}
    finally:
        bench.close()


@pytest.mark.usefixtures("one_step")
def test_a_disk_that_got_smaller_is_trimmed_in_later_rounds() -> None:
    disk = MemoryTier()
    first = TierBench(16, disk=disk)
    for letter in LETTERS:
        first.store(letter)
    while first.busy or first.tiers.more:
        first.step()
    first.close()
    bench = TierBench(16, disk=disk, disk_bytes=2 * file_bytes(CHUNK))
    try:
        while bench.values()["disk_scanning"]:
            bench.step()
        assert bench.values()["disk_chunks"] >= len(LETTERS) - 2
        while bench.tiers.more:
            bench.tick()
        bench.settle()
        assert len(disk.chunks) == bench.values()["disk_chunks"] == 2
    finally:
        bench.close()


def test_a_scan_that_hangs_is_noticed_and_stores_go_on() -> None:
    disk = MemoryTier(num_threads=2)
    disk.stop("scan")
    bench = TierBench(2, disk=disk)
    try:
        bench.until(lambda: bench.values()["disk_queue"] == 0)  # how much room there is was answered
        assert bench.store("ab") == 2
        assert bench.store("x") == 0
        bench.tick()
        bench.tick(31)
        assert bench.values()["disk_paused"] == 1
        assert not bench.index.dirty
        assert bench.store("xy") == 2
        disk.let_go()
        bench.settle()
        assert bench.values()["disk_paused"] == 0
        bench.store("xyz", start=2)
        bench.tick(11)
        bench.settle()
        assert set(disk.chunks) >= {name("x"), name("xy")}
    finally:
        bench.close()
