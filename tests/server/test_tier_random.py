"""Stores, loads, restarts, clears and faults in any order: nothing kept is lost, nothing is wrong, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.cache.tiers.disk import DiskTier
from kvferry.errors import TierError, TierFullError, TierUnavailableError
from kvferry.server.tiers import disk as disk_module
from kvferry.server.tiers.disk import file_bytes
from tier_bench import CHUNK, SPACE, TierBench, keys, name


def prompts_of(choose: random.Random) -> list[str]:
    """Prompts of one to six chunks, of which many begin alike."""
    return ["".join(choose.choices("ab", k=choose.randint(1, 6))) for _ in range(40)]


def memory_disks(_: Path) -> Callable[[], MemoryTier]:
    """One disk, in memory, for one server after the other."""
    kept = MemoryTier().chunks

    def make() -> MemoryTier:
        disk = MemoryTier(num_threads=3)
        disk.chunks = kept
        return disk

    return make


def real_disks(path: Path) -> Callable[[], DiskTier]:
    """One folder, for one server after the other."""
    return lambda: DiskTier(path)


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("disks", [memory_disks, real_disks])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_was_stored_and_still_fits_is_lost(
    tmp_path: Path, disks: Callable[[Path], Callable[[], MemoryTier | DiskTier]], seed: int, *, write_back: bool
) -> None:
    """Small memory over a disk that has room for all."""
    choose = random.Random(seed)
    prompts, make_disk = prompts_of(choose), disks(tmp_path)
    bench = TierBench(6, disk=make_disk(), write_back=write_back)
    stored: set[str] = set()
    num_stored = num_loaded = 0
    for _ in range(250):
        prompt, action = choose.choice(prompts), choose.random()
        if action < 0.45:
            count = bench.store(prompt)
            stored.update(prompt[: end + 1] for end in range(count))
            num_stored += count
        elif action < 0.9:
            known = next((end for end in range(len(prompt)) if prompt[: end + 1] not in stored), len(prompt))
            num_loaded += load_at_least(bench, prompt, known)
        elif action < 0.97:
            bench.tick()
        else:
            bench.tiers.flush()
            bench.settle()
            bench.close()
            bench = TierBench(6, disk=make_disk(), write_back=write_back)
    values = bench.values()
    bench.close()
    assert values["disk_missing"] == values["disk_writes_failed"] == values["disk_writes_skipped"] == 0
    assert num_stored > 50
    assert num_loaded > 50


def load_at_least(bench: TierBench, prompt: str, count: int) -> int:
    """Load a prompt's first `count` chunks, as many at a time as there is room for beside what is not written yet."""
    num_useless = 0
    while (before := bench.have(prompt)) < count:
        num_useless = num_useless + 1 if bench.load(prompt) <= before else 0
        if num_useless and bench.in_flight:
            bench.step()
            num_useless = 0
        assert num_useless < 3, (prompt, before, count)  # what was in the way may have been written meanwhile
    for last in bench.chunks(prompt)[-1:]:
        bench.tiers.on_used(last)
    return bench.check(prompt)


FAULTS = (
    ("write", TierUnavailableError("gone")),
    ("write", TierFullError("full")),
    ("write", TierError("bad")),
    ("read", TierUnavailableError("gone")),
    ("read", ZeroDivisionError("a mistake of ours")),
    ("find", TierUnavailableError("gone")),
    ("delete", TierUnavailableError("gone")),
    ("measure", TierUnavailableError("gone")),
    ("scan", TierUnavailableError("gone")),
)


def disturb(bench: TierBench, choose: random.Random, prompts: list[str]) -> None:
    """Let something go wrong in a tier, or let all go well again."""
    for tier in (bench.disk, bench.remote):
        assert tier is not None
        action, prompt = choose.random(), choose.choice(prompts)
        if action < 0.3:
            call, error = choose.choice(FAULTS)
            tier.failures[call] = error
        elif action < 0.5 and name(prompt) in tier.chunks:
            tier.spoil(name(prompt))
        elif action < 0.6:
            tier.chunks.pop(name(prompt), None)
        elif action < 0.7:
            tier.limit_bytes = choose.choice([0, 10 * CHUNK, 1 << 30])
        else:
            tier.failures.clear()


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_nothing_is_wrong_or_left_over(
    monkeypatch: pytest.MonkeyPatch, seed: int, *, write_back: bool
) -> None:
    monkeypatch.setattr(disk_module, "_STEPS_AT_ONCE", seed % 3)  # the rest of what is cleared goes bit by bit
    choose = random.Random(seed)
    prompts = prompts_of(choose)
    disk, remote = MemoryTier(num_threads=3), MemoryTier("remote", num_threads=3)
    bench = TierBench(7, disk=disk, disk_bytes=12 * file_bytes(CHUNK), remote=remote, write_back=write_back)
    for _ in range(300):
        prompt, action = choose.choice(prompts), choose.random()
        if action < 0.35:
            bench.store(prompt)
        elif action < 0.6:
            bench.load(prompt)
        elif action < 0.7:
            bench.fetch(prompt)
        elif action < 0.8:
            forget(bench, prompt, choose.randrange(len(prompt)))
        elif action < 0.9:
            disturb(bench, choose, prompts)
        else:
            bench.tick(choose.choice([0, 1, 11]))
        while choose.random() < 0.5 and not bench.posted.empty():
            bench.step()
    for tier in (disk, remote):
        tier.failures.clear()
        tier.limit_bytes = 1 << 30
    for _ in range(3):
        bench.tick(31)
        bench.tiers.flush()
        bench.settle()
        bench.tick()
        bench.settle()
    check_nothing_is_left(bench, disk)
    bench.close()


def forget(bench: TierBench, prompt: str, start: int) -> None:
    """Clear a chain from some chunk on, as the server does."""
    chunk = bench.index.find(SPACE, keys(prompt)[start])
    if chunk is not None:
        bench.index.discard(chunk)
    bench.tiers.clear(SPACE, keys(prompt), start)
    assert bench.have(prompt) <= start


def check_nothing_is_left(bench: TierBench, disk: MemoryTier) -> None:
    """No memory is held, and the index of the disk has just what the disk has."""
    bench.forget_memory()
    assert (len(bench.index), bench.pool.used_bytes, len(bench.index.dirty)) == (0, 0, 0)
    values = bench.values()
    assert values["fetches"] == values["writes"] == values["remote_backlog_bytes"] == values["remote_deleting"] == 0
    side = bench.tiers._disk
    assert side is not None
    assert (side._unwritten_bytes, len(side._deletions)) == (0, 0)
    indexed = {(chunk.space.digest, chunk.key) for chunk in side._chunks.values()}
    assert len(side.index) == len(indexed)
    assert set(disk.chunks) <= indexed  # what somebody took from the disk is not known yet
    assert side.pool.used_bytes == len(indexed) * file_bytes(CHUNK) <= side.pool.capacity_bytes
