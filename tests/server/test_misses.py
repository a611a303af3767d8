"""Each reason why a lookup finds less than it asks for, provoked once, is counted once (U6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Side, Stage, Zygote, eventually

CHUNK = 65_536
MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(zygote: Zygote, tmp_path: Path) -> Iterator[MakeStage]:
    made: list[Stage] = []

    def make(num_chunks: int, **config: object) -> Stage:
        made.append(Stage(zygote, tmp_path, memory_bytes=num_chunks * CHUNK, **config))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def started(stage: Stage, **arguments: object) -> Side:
    engine = stage.engine(**arguments)  # type: ignore[arg-type]
    stage.wait_for_memory(engine)
    eventually(lambda: not engine.call("stats")["stats"].get("disk_scanning"))
    return engine


def misses(side: Side) -> dict[str, float]:
    """The counters that are not 0."""
    values: dict[str, float] = side.call("stats")["stats"]
    return {name.removeprefix("misses_"): n for name, n in values.items() if name.startswith("misses_") and n}


@contextmanager
def counts(side: Side, reason: str) -> Iterator[None]:
    """What is done inside misses once, for that reason and no other."""
    before = misses(side)
    yield
    after = misses(side)
    assert {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)} == {reason: 1}


def store(side: Side, seed: int, chunks: int, *, wait: bool = True) -> dict[str, int]:
    blocks = list(range(chunks * CHUNK_BLOCKS))
    result: dict[str, int] = side.call("store", seed=seed, num_tokens=chunks * CHUNK_TOKENS, blocks=blocks, wait=wait)
    return result


def lookup(side: Side, seed: int, chunks: int, wait_s: float = 0.0) -> int:
    """How many chunks are found; nothing is kept for that."""
    found = side.call("lookup", seed=seed, num_tokens=chunks * CHUNK_TOKENS, wait_s=wait_s)
    side.call("release", lease=found["lease"])
    return int(found["tokens"]) // CHUNK_TOKENS


def test_every_reason_that_needs_no_lower_tier(make_stage: MakeStage) -> None:
    stage = make_stage(8, verify_memory=True)
    engine = started(stage)
    with counts(engine, "not_stored"):
        assert lookup(engine, 1, 2) == 0
    assert store(engine, 1, 8)["skipped"] == 2  # a store may have 6 of the 8
    with counts(engine, "dropped"):
        assert lookup(engine, 1, 8) == 6
    store(engine, 2, 4)
    with counts(engine, "evicted"):
        assert lookup(engine, 1, 6) == 4
    engine.call("clear")
    with counts(engine, "not_stored"):
        assert lookup(engine, 1, 6) == 0

    store(engine, 3, 3)
    stage.server.call("meddle", what="spoil", rank=0, place=2)
    lease = engine.call("lookup", seed=3, num_tokens=3 * CHUNK_TOKENS)["lease"]
    assert engine.call("retrieve", lease=lease, blocks=list(range(20, 32)))["failed"] == list(range(24, 32))
    engine.call("release", lease=lease)
    with counts(engine, "integrity"):
        assert lookup(engine, 3, 3) == 1

    other = started(stage, register={"engine_id": "other"}, heads=4)
    with counts(engine, "geometry"):
        assert lookup(other, 3, 1) == 0

    engine.call("stick")
    store(engine, 4, 2, wait=False)
    eventually(lambda: engine.call("stats")["stats"]["memory_used_bytes"] > 2 * CHUNK)
    assert engine.call("cancel") == {"stopped": True}
    with counts(other, "failed"):
        assert lookup(engine, 4, 2) == 0


def test_an_engine_that_is_not_whole(make_stage: MakeStage) -> None:
    stage = make_stage(8)
    ranks = [started(stage, register={"engine_id": "tp", "rank": rank, "world_size": 2}) for rank in range(2)]
    scheduler = started(stage, register={})
    assert scheduler.call("attach", engine_id="tp")["ready"]
    ranks[1].call("unregister")
    with counts(scheduler, "not_ready"):
        assert lookup(scheduler, 1, 1) == 0
    assert lookup(scheduler, 1, 0) == 0
    assert misses(scheduler) == {"not_ready": 1}


def test_a_rank_that_lacks_what_another_has_is_no_other_geometry(make_stage: MakeStage) -> None:
    stage = make_stage(8)
    ranks = [started(stage, register={"engine_id": "tp", "rank": rank, "world_size": 2}) for rank in range(2)]
    store(ranks[0], 1, 1)
    with counts(ranks[0], "not_stored"):
        assert lookup(ranks[0], 1, 1) == 0


def test_a_tenant_at_its_quota_drops(make_stage: MakeStage) -> None:
    stage = make_stage(8, tenant_quotas={"*": 3 * CHUNK})
    engine = started(stage)
    assert store(engine, 1, 4) == {"stored": 3, "present": 0, "skipped": 1}
    assert engine.call("stats")["stats"]["chunks_skipped_quota"] == 1
    with counts(engine, "dropped"):
        assert lookup(engine, 1, 4) == 3
    assert store(engine, 2, 2)["stored"] == 2
    assert engine.call("stats")["stats"]["memory_used_bytes"] == 3 * CHUNK


def test_a_load_that_does_not_come_in_time(make_stage: MakeStage, tmp_path: Path) -> None:
    stage = make_stage(4, disk_path=str(tmp_path / "disk"), disk_bytes=16 << 20)
    engine = started(stage)
    store(engine, 1, 3)
    eventually(lambda: engine.call("stats")["stats"]["disk_chunks_written"] == 3)
    store(engine, 2, 3)
    eventually(lambda: engine.call("stats")["stats"]["disk_chunks_written"] == 6)
    stage.server.call("hold_files", whole=True)
    with counts(engine, "timed_out"):
        assert lookup(engine, 1, 3, wait_s=0.05) < 3
    engine.ask("lookup", seed=1, num_tokens=3 * CHUNK_TOKENS, wait_s=20)
    other = started(stage, register={"engine_id": "other"})
    eventually(lambda: other.call("stats")["stats"]["lookups_waiting"] == 1)
    stage.server.call("let_files_go")
    assert engine.answer()["tokens"] == 3 * CHUNK_TOKENS
    assert misses(engine) == {"timed_out": 1}
