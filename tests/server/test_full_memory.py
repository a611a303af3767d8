"""A memory that is full, and cannot become less full: nobody waits for room (C9)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Side, Stage, Zygote

CHUNK = 65_536
BLOCKS = list(range(8 * CHUNK_BLOCKS))


@pytest.fixture
def full(zygote: Zygote, tmp_path: Path) -> Iterator[tuple[Stage, Side, int]]:
    """A server with room for 4 chunks, all of them promised; an engine, and its lease."""
    stage = Stage(zygote, tmp_path, memory_bytes=4 * CHUNK)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        store(engine, 1, 3)
        store(engine, 1, 4)
        found = engine.call("lookup", seed=1, num_tokens=4 * CHUNK_TOKENS)
        assert found["tokens"] == 4 * CHUNK_TOKENS
        yield stage, engine, found["lease"]
    finally:
        stage.close()


def store(engine: Side, seed: int, chunks: int) -> dict[str, int]:
    blocks = BLOCKS[: chunks * CHUNK_BLOCKS]
    done: dict[str, int] = engine.call("store", seed=seed, num_tokens=chunks * CHUNK_TOKENS, blocks=blocks)
    return done


def test_a_store_that_finds_no_room_is_dropped_at_once(full: tuple[Stage, Side, int]) -> None:
    _, engine, lease = full
    begun = time.monotonic()
    assert store(engine, 2, 1) == {"stored": 0, "present": 0, "skipped": 1}
    assert store(engine, 1, 5) == {"stored": 0, "present": 4, "skipped": 1}
    assert time.monotonic() - begun < 1
    values = engine.call("stats")["stats"]
    assert (values["chunks_skipped_full"], values["stores_failed"], values["chunks_evicted"]) == (2, 0, 0)
    assert engine.call("ping")["ms"] < 1000
    assert engine.call("retrieve", lease=lease, blocks=BLOCKS[:16])["failed"] == []
    assert store(engine, 2, 1)["stored"] == 1


def test_what_is_larger_than_the_memory_ends_at_once(full: tuple[Stage, Side, int]) -> None:
    """A prompt of 5 chunks: 4 are promised, and blocks for the fifth are left as they are."""
    stage, engine, lease = full
    begun = time.monotonic()
    found = engine.call("lookup", seed=1, num_tokens=5 * CHUNK_TOKENS)
    assert (found["tokens"], found["lease"]) == (4 * CHUNK_TOKENS, lease)
    engine.call("wipe")
    blank = engine.call("digest", blocks=BLOCKS[16:20])
    assert engine.call("retrieve", lease=lease, blocks=BLOCKS[:20])["failed"] == []
    assert engine.call("digest", blocks=BLOCKS[16:20]) == blank
    failed = engine.call("retrieve", lease=lease, blocks=BLOCKS[:20])
    assert failed["failed"] == BLOCKS[:20]
    assert "[lease]" in failed["error"]
    assert time.monotonic() - begun < 5
    large = stage.engine(register={"engine_id": "large"}, heads=64)  # a chunk of it has 8 times as many bytes
    assert store(large, 3, 1) == {"stored": 0, "present": 0, "skipped": 1}
    assert large.call("ping")["ms"] < 1000
