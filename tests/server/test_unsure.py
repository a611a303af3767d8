"""What a store says is there can be looked up: what hangs on another store that has not ended is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.config import ServerConfig
from kvferry.errors import KVFerryError
from kvferry.ipc import allocate_shared
from kvferry.server import jobs
from kvferry.server.server import CacheServer
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
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


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheClient]:
    """Of a server in this process, that gives a job half a second at most."""
    monkeypatch.setattr(jobs, "MAX_TIMEOUT_S", 0.5)
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=16 << 20, device="cpu")
    with CacheServer(config), CacheClient(f"unix://{tmp_path / 's'}") as made:
        yield made


def test_no_job_keeps_what_it_has_reserved_for_as_long_as_it_likes(client: CacheClient) -> None:
    cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
    client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format=FORMAT)
    eventually(lambda: client.stats()["memory_bytes"] >= 16 << 20)
    registration = client._presence.registration
    assert registration is not None
    registration.ring._signal = lambda ticket, stream: None  # type: ignore[method-assign]
    job = client.store(prompt(1, CHUNK_TOKENS), list(range(CHUNK_BLOCKS)), timeout_s=3600.0)
    with pytest.raises(KVFerryError, match="not done in time"):
        job.wait(20)
    assert client.stats()["memory_used_bytes"] == 0
