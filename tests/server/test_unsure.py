"""What a store says is there can be looked up: what hangs on another store that has not ended is skipped."""

from __future__ import annotations

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Side, Stage, eventually


def store(side: Side, num_chunks: int, *, wait: bool = True) -> dict[str, int]:
    blocks = list(range(num_chunks * CHUNK_BLOCKS))
    return side.call("store", seed=1, num_tokens=num_chunks * CHUNK_TOKENS, blocks=blocks, wait=wait)


def found(side: Side, num_chunks: int) -> int:
    return int(side.call("lookup", seed=1, num_tokens=num_chunks * CHUNK_TOKENS)["tokens"]) // CHUNK_TOKENS


def stats(side: Side) -> dict[str, float]:
    values: dict[str, float] = side.call("stats")["stats"]
    return values


def test_what_hangs_on_a_store_that_may_fail_is_not_said_to_be_there(stage: Stage) -> None:
    slow, well = stage.engine(register={"engine_id": "a"}), stage.engine(register={"engine_id": "b"})
    stage.wait_for_memory(well)
    assert store(well, 1) == {"stored": 1, "present": 0, "skipped": 0}
    slow.call("stick")
    store(slow, 3, wait=False)
    eventually(lambda: stats(well)["chunks"] == 3)
    assert store(well, 5) == {"stored": 0, "present": 1, "skipped": 4}
    assert store(well, 3) == {"stored": 0, "present": 1, "skipped": 2}
    assert (stats(well)["chunks_skipped_unsure"], found(well, 5)) == (6, 1)
    slow.close()
    eventually(lambda: stats(well)["chunks"] == 1)
    assert found(well, 5) == 1
    assert store(well, 5) == {"stored": 4, "present": 1, "skipped": 0}
    assert found(well, 5) == 5


def test_stores_of_one_engine_may_follow_each_other_closely(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    for num_chunks in range(1, 9):
        store(engine, num_chunks, wait=False)
    assert store(engine, 9) == {"stored": 1, "present": 8, "skipped": 0}
    assert (found(engine, 9), stats(engine)["chunks_skipped_unsure"]) == (9, 0)
