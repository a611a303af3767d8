"""What the disk forgets is out of sight at once, and goes in pieces, however much it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.server.net.rounds import Budget
from kvferry.server.tiers import disk as disk_module
from serving.engine_side import CHUNK_TOKENS
from serving.tiers import MakeStage, files, load, restart, settle, started, store, wait_until_ready
from tier_bench import SPACE, TierBench, keys, name


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[TierBench]:
    """Two chains of 40 chunks that begin alike, and another one, on a disk that forgets a step at a time."""
    monkeypatch.setattr(disk_module, "_STEPS_AT_ONCE", 3)
    made = TierBench(128, disk=MemoryTier())
    for prompt in (CHAIN, FORK, "x" * 5):
        made.store(prompt)
        made.settle()
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "spend", lambda self, step: step())
        yield made
    made.close()


CHAIN, FORK = "a" * 40, "aa" + "b" * 38


def disk_of(bench: TierBench) -> MemoryTier:
    assert bench.disk is not None
    return bench.disk


def clear(bench: TierBench, prompt: str, start: int = 0) -> list[str]:
    """Clear as the server does; what is returned gets the answer."""
    answers: list[str] = []
    ending = bench.tiers.clearing(answers.append)
    chunk = bench.index.find(SPACE, keys(prompt)[start])
    if chunk is not None:
        bench.index.discard(chunk)
    bench.tiers.clear(SPACE, keys(prompt), start, ending=ending)
    ending.end()
    return answers


def finish(bench: TierBench, answers: list[str]) -> int:
    """Go on until it is answered; how many rounds that took."""
    rounds = 0
    while not answers:
        bench.tick()
        rounds += 1
        while not bench.posted.empty():
            item = bench.posted.get()
            bench._handlers[type(item)](item)
    return rounds


def test_a_large_tree_is_out_of_sight_at_once_and_goes_step_by_step(bench: TierBench) -> None:
    answers = clear(bench, CHAIN, 1)
    assert bench.values()["disk_chunks"] == 83  # all of it is still there
    assert not bench.tiers.idle
    assert bench.load(FORK) == bench.load(CHAIN) == 1
    assert bench.load("x" * 5) == 5
    assert answers == []
    assert finish(bench, answers) > 78
    assert answers == [""]
    assert set(disk_of(bench).chunks) == {name("a"), *(name("x" * end) for end in range(1, 6))}
    bench.settle()
    assert bench.tiers.idle


def test_what_is_stored_below_a_tree_that_is_going_is_written_when_it_has_gone(bench: TierBench) -> None:
    disk_of(bench).log.clear()
    answers = clear(bench, CHAIN)
    assert bench.store(FORK[:3]) == 3
    bench.tick()
    assert disk_of(bench).log.count("write") == 0
    finish(bench, answers)
    bench.settle()
    bench.forget_memory()
    assert bench.load(FORK) == 3
    assert bench.values()["disk_chunks"] == 8


@pytest.mark.parametrize("starts", [(5, 1), (1, 5), (1, 1)])
def test_who_clears_what_is_going_already_waits_for_all_of_it(bench: TierBench, starts: tuple[int, int]) -> None:
    disk_of(bench).stop("delete")
    first, second = (clear(bench, CHAIN, start) for start in starts)
    assert bench.load(CHAIN) == min(starts)
    for _ in range(300):
        bench.tick()
    assert bench.values()["disk_chunks"] == 6
    assert first == second == []
    disk_of(bench).let_go()
    finish(bench, first)
    finish(bench, second)
    assert first == second == [""]
    assert len(disk_of(bench).chunks) == 6


def test_a_space_that_is_cleared_meanwhile_takes_the_tree_with_it(bench: TierBench) -> None:
    first = clear(bench, CHAIN)
    second: list[str] = []
    ending = bench.tiers.clearing(second.append)
    bench.index.discard_space(SPACE)
    bench.tiers.clear(SPACE, ending=ending)
    ending.end()
    assert bench.load("x" * 5) == 0
    finish(bench, first)
    finish(bench, second)
    assert first == second == [""]
    assert not disk_of(bench).chunks


def test_what_hangs_from_a_torn_file_goes_bit_by_bit(bench: TierBench) -> None:
    side = bench.tiers._disk
    assert side is not None
    torn = side.find(SPACE, keys("aa")[-1])
    assert torn is not None
    side.discard(torn)
    side.discard(torn)
    assert bench.values()["disk_chunks"] > 80
    bench.forget_memory()
    assert bench.load(FORK) == 1
    assert side.find(SPACE, keys(CHAIN)[-1]) is None
    while bench.tiers.more:
        bench.tick()
    bench.settle()
    assert len(disk_of(bench).chunks) == bench.values()["disk_chunks"] == 6


def test_what_was_cleared_is_not_found_by_a_server_that_comes_after_a_kill(make_stage: MakeStage) -> None:
    stage = make_stage(memory_bytes=32 << 20)
    engine = stage.engine(num_blocks=1300)
    wait_until_ready(stage, engine)
    held = store(engine, 1, 300)
    assert settle(engine)["disk_chunks"] == 300
    assert engine.call("clear", seed=1, num_tokens=300 * CHUNK_TOKENS)["cleared"] == 300
    restart(stage)
    wait_until_ready(stage, engine)
    assert load(engine, 1, 300, held, wait_s=0) == 0
    assert files(stage) == {}
    other = store(started(stage, register={"engine_id": "other"}), 2, 4)
    assert settle(engine)["disk_chunks"] == 4
    assert load(engine, 2, 4, other) == 4
