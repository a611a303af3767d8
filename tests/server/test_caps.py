"""What one session may keep from others has a limit, however it asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.cache import leases
from kvferry.client import CacheClient
from kvferry.config import ServerConfig
from kvferry.errors import KVFerryError
from kvferry.ipc import allocate_shared
from kvferry.server import jobs
from kvferry.server.server import CacheServer
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
from serving.process import eventually


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheClient]:
    """With a cache, of a server in this process that gives a job half a second at most, and a session two leases."""
    monkeypatch.setattr(jobs, "MAX_TIMEOUT_S", 0.5)
    monkeypatch.setattr(leases, "MAX_LEASES", 2)
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=16 << 20, device="cpu")
    with CacheServer(config), CacheClient(f"unix://{tmp_path / 's'}") as made:
        cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
        made.register_kv_caches({"layer": cache}, engine_id="e", model="m", format=FORMAT)
        eventually(lambda: made.stats()["memory_bytes"] >= 16 << 20)
        yield made


def test_no_job_keeps_what_it_has_reserved_for_as_long_as_it_likes(client: CacheClient) -> None:
    registration = client._presence.registration
    assert registration is not None
    registration.ring._signal = lambda ticket, stream: None  # type: ignore[method-assign]
    job = client.store(prompt(1, CHUNK_TOKENS), list(range(CHUNK_BLOCKS)), timeout_s=3600.0)
    with pytest.raises(KVFerryError, match="not done in time"):
        job.wait(20)
    assert client.stats()["memory_used_bytes"] == 0


def test_no_session_pins_as_much_as_it_likes(client: CacheClient) -> None:
    tokens = prompt(1, 2 * CHUNK_TOKENS)
    client.store(tokens, list(range(2 * CHUNK_BLOCKS))).wait(20)
    found = [client.lookup(request, tokens) for request in ("a", "b", "c", "a")]
    assert [each.tokens for each in found] == [2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS, 0, 2 * CHUNK_TOKENS]
    assert (found[2].lease_id, found[3].lease_id) == (0, found[0].lease_id)
    assert (client.stats()["misses_leases"], client.stats()["leases"]) == (1, 2)
    client.release(found[1].lease_id)
    assert client.lookup("c", tokens).tokens == 2 * CHUNK_TOKENS
