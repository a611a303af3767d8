"""A thread that hangs makes the server unhealthy within ten seconds, until it moves again."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cache.tiers.disk import DiskTier
from kvferry.client import CacheClient
from kvferry.copy import HostCopier
from kvferry.ipc import allocate_shared
from kvferry.server import CacheServer, ServerConfig
from serving.process import eventually

TOKENS = list(range(64))
BLOCKS = [0, 1, 2, 3]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    config = ServerConfig(
        socket_path=str(tmp_path / "s"),
        memory_bytes=1 << 20,
        device="cpu",
        disk_path=str(tmp_path / "disk"),
        disk_bytes=1 << 30,
        metrics=":0",
        stall_s=2,
    )
    with CacheServer(config) as made:
        yield made


@pytest.fixture
def client(server: CacheServer) -> Iterator[CacheClient]:
    cache = allocate_shared((2, 8, 16, 8, 8))
    with CacheClient(server.config.socket_path) as made:
        made.register_kv_caches({"layer": cache}, engine_id="e", model="m", format="vllm_flash_attention")
        eventually(lambda: made.stats()["memory_bytes"] == 1 << 20)
        yield made


class Hang:
    """Stands for a method, and hangs in it until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        real = getattr(kind, name)

        def hang(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            self.go_on.wait(30)
            return real(*args, **kwargs)

        monkeypatch.setattr(kind, name, hang)


def health(server: CacheServer) -> tuple[int, str]:
    assert server.metrics_url is not None
    url = server.metrics_url.removesuffix("/metrics") + "/health"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (HostCopier, "steps", "the worker of cpu has been in a copy"),
        (DiskTier, "write", "of the disk tier has been in WriteChunk"),
    ],
)
def test_a_stuck_thread_with_a_store_queued(
    server: CacheServer, client: CacheClient, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, reason: str
) -> None:
    assert health(server)[0] == 200
    hang = Hang(monkeypatch, kind, name)
    job = client.store(TOKENS, BLOCKS)
    try:
        assert hang.begun.wait(10)
        assert eventually(lambda: health(server)[0] == 503) < 10
        reasons = json.loads(health(server)[1])["reasons"]
        assert len(reasons) == 1
        assert reason in reasons[0]
        started = time.monotonic()
        assert client.stats()["healthy"] == 0
        assert time.monotonic() - started < 1
    finally:
        hang.go_on.set()
    job.wait(10)
    eventually(lambda: health(server)[0] == 200)
    assert client.stats()["healthy"] == 1
    eventually(lambda: client.stats()["disk_chunks_written"] == 1)
