"""Stores that wait for a slow engine hold a share of the memory, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Side, Stage, Zygote, eventually

NUM_CHUNKS = 16  # that the memory holds


@pytest.fixture
def small_stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, memory_bytes=NUM_CHUNKS << 16)
    yield made
    made.close()


def store(side: Side, seed: int, num_chunks: int, *, wait: bool = True) -> dict[str, int]:
    blocks = list(range(num_chunks * CHUNK_BLOCKS))
    return side.call("store", seed=seed, num_tokens=num_chunks * CHUNK_TOKENS, blocks=blocks, wait=wait)


def test_a_slow_engines_stores_leave_room_for_others(small_stage: Stage) -> None:
    slow, well = small_stage.engine(register={"engine_id": "a"}), small_stage.engine(register={"engine_id": "b"})
    small_stage.wait_for_memory(well)
    slow.call("stick")
    for seed in range(NUM_CHUNKS):
        store(slow, seed, 2, wait=False)
    eventually(lambda: well.call("stats")["stats"]["stores"] == NUM_CHUNKS)
    stats = well.call("stats")["stats"]
    assert stats["memory_used_bytes"] == (12 << 16)
    assert stats["chunks_skipped_share"] == 2 * NUM_CHUNKS - 12
    assert store(well, 100, 4)["stored"] == 4
    assert slow.call("cancel", job=0) == {"stopped": True}
    store(slow, 101, 3, wait=False)
    eventually(lambda: well.call("stats")["stats"]["chunks_skipped_share"] == 2 * NUM_CHUNKS - 12 + 1)


def test_one_store_is_cut_at_the_share_too(small_stage: Stage) -> None:
    engine = small_stage.engine()
    small_stage.wait_for_memory(engine)
    assert store(engine, 1, NUM_CHUNKS) == {"stored": 12, "present": 0, "skipped": 4}
    assert store(engine, 1, NUM_CHUNKS) == {"stored": 4, "present": 12, "skipped": 0}


def test_a_chunk_that_alone_is_more_than_the_share_is_stored(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, memory_bytes=1 << 16)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        assert store(engine, 1, 2) == {"stored": 1, "present": 0, "skipped": 1}
    finally:
        stage.close()
