"""What is cleared is answered for: it does not come back, or the answer says that it may."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.errors import TierUnavailableError
from tier_bench import CHUNK, SPACE, TierBench, keys, name

Make = Callable[..., TierBench]

DENIED = TierUnavailableError("status 403 Forbidden")


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches, and closes them."""
    made: list[TierBench] = []

    def make_one(num_chunks: int = 16, **arguments: object) -> TierBench:
        made.append(TierBench(num_chunks, **arguments))  # type: ignore[arg-type]
        made[-1].settle()
        return made[-1]

    yield make_one
    for bench in made:
        bench.close()


def tier_of(bench: TierBench) -> MemoryTier:
    tier = bench.disk or bench.remote
    assert tier is not None
    return tier


def clear(bench: TierBench, prompt: str = "", start: int = 0) -> list[str]:
    """Clear as the server does; what is returned gets the answer."""
    answers: list[str] = []
    ending = bench.tiers.clearing(answers.append)
    if prompt:
        chunk = bench.index.find(SPACE, keys(prompt)[start])
        if chunk is not None:
            bench.index.discard(chunk)
    else:
        bench.index.discard_space(SPACE)
    bench.tiers.clear(SPACE, keys(prompt), start, ending=ending)
    ending.end()
    return answers


def test_what_hangs_from_a_cleared_chain_does_not_come_back_when_that_is_stored_anew(make: Make) -> None:
    bench = make(remote=MemoryTier("remote"))
    bench.store("abcd")
    bench.settle()
    answers = clear(bench, "ab")
    bench.settle()
    assert answers == [""]
    bench.store("ab")
    bench.settle()
    assert bench.load("abcd") == 2


@pytest.mark.parametrize("prompt", ["ab", ""])
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_the_answer_comes_when_all_is_deleted(make: Make, tier: str, prompt: str) -> None:
    bench = make(**{tier: MemoryTier(tier)})
    bench.store("abc")
    bench.store("abd")
    bench.settle()
    tier_of(bench).stop("delete")
    answers = clear(bench, prompt)
    tier_of(bench).wait_inside(1)
    assert answers == []
    assert not bench.tiers.idle
    again = clear(bench, prompt)  # there is nothing of it in the index any more
    assert bench.store("abc") == 3
    assert again == []
    tier_of(bench).let_go()
    bench.until(lambda: bool(answers and again))
    assert answers == again == [""]
    assert name("abd") not in tier_of(bench).chunks
    bench.settle()
    assert bench.tiers.idle


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_what_is_being_written_when_it_is_cleared_is_waited_for(make: Make, tier: str) -> None:
    bench = make(**{tier: MemoryTier(tier)})
    tier_of(bench).stop("write")
    bench.store("a")
    tier_of(bench).wait_inside(1)
    answers = clear(bench, "a")
    assert bench.store("a") == 1
    while bench.values()[f"{tier}_queue"] > 1:
        bench.step()
    bench.tick()
    assert answers == []
    assert tier_of(bench).log.count("write") == 1  # two at one time might end in the wrong order
    tier_of(bench).let_go()
    bench.settle()
    assert answers == [""]
    assert tier_of(bench).log.count("write") == 2  # what is there is of the second one
    bench.forget_memory()
    assert bench.load("a") == 1


@pytest.mark.parametrize("prompt", ["ab", ""])
def test_what_the_scan_has_not_found_yet_is_waited_for(make: Make, prompt: str) -> None:
    first = make(disk=MemoryTier())
    first.store("abc")
    first.settle()
    disk = MemoryTier()
    disk.chunks = tier_of(first).chunks
    disk.stop("scan", "delete")
    bench = TierBench(16, disk=disk)
    try:
        answers = clear(bench, prompt)
        assert not bench.tiers.idle
        disk.let_go("scan")
        bench.until(lambda: not bench.values()["disk_scanning"])
        assert answers == []
        disk.let_go()
        bench.settle()
        assert answers == [""]
        assert not disk.chunks
    finally:
        bench.close()


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_tier_that_cannot_delete_is_told_and_goes_on_in_all_else(
    make: Make, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(**{tier: MemoryTier(tier)})
    bench.store("abc")
    bench.settle()
    there = dict(tier_of(bench).chunks)
    tier_of(bench).failures["delete"] = DENIED
    for _ in range(4):
        answers = clear(bench, "ab")
        bench.settle()
        assert answers == [str(DENIED)]
        assert bench.values()[f"{tier}_paused"] == 0
        assert bench.fetch("ab") is None
    num_tries = bench.values()[f"{tier}_deletes_failed"]
    for _ in range(100):
        bench.tick(1)
        bench.settle()
    assert 2 <= bench.values()[f"{tier}_deletes_failed"] - num_tries <= 6
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert bench.values()[f"{tier}_deleting"] <= len(there)
    assert bench.tiers.idle  # the end of the server does not wait for it
    tier_of(bench).failures.clear()
    bench.tick(300)
    bench.settle()
    assert bench.values()[f"{tier}_deleting"] == 0
    assert not tier_of(bench).chunks


def test_a_file_that_could_not_be_deleted_and_was_written_anew_stays(make: Make) -> None:
    bench = make(disk=MemoryTier())
    bench.store("ab")
    bench.settle()
    tier_of(bench).failures["delete"] = DENIED
    clear(bench)
    bench.settle()
    bench.store("ab")
    bench.settle()
    tier_of(bench).failures.clear()
    bench.tick(300)
    bench.settle()
    assert list(tier_of(bench).chunks) == [name("a"), name("ab")]
    assert bench.values()["disk_used_bytes"] == 4 * CHUNK
    assert clear(bench, "a") == []


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_tier_that_is_left_alone_or_slow_is_told(make: Make, tier: str) -> None:
    bench = make(**{tier: MemoryTier(tier)})
    bench.store("abc")
    bench.settle()
    tier_of(bench).stop("delete")
    slow = clear(bench, "abc", 2)
    bench.tick(20)
    bench.tiers._queues[tier]._moved_at += 1000  # other calls go on
    bench.tick(30)
    assert slow == []
    bench.tick(15)
    assert [text.partition(" within")[0] for text in slow] == ["the lower tiers have not deleted it"]
    bench.tiers._queues[tier]._moved_at -= 2000
    bench.tick()
    assert clear(bench) == [f"the {tier} tier is left alone at present, after failures"]
    tier_of(bench).let_go()
