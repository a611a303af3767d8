"""The end of a server: what is late or failed is told, and no memory is given back that may still be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.errors import DeadlineError, KVFerryError, RequestError
from kvferry.ipc import allocate_shared, process_table
from kvferry.server import CacheServer, ServerConfig
from kvferry.server import server as server_module
from kvferry.server.device import HostDevice
from kvferry.server.memory import Memory
from serving.engine_side import CHUNK_TOKENS
from serving.process import Stage, Zygote, eventually


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu")


def test_memory_of_any_size_is_served(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, memory_bytes=(256 << 20) + 1)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        assert engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])["stored"] == 1
    finally:
        stage.close()


def test_a_worker_that_is_late_keeps_the_memory(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, prepares = threading.Event(), threading.Event()
    closed: list[Memory] = []
    close_memory = Memory.close

    def prepare(self: HostDevice, address: int, nbytes: int) -> None:
        prepares.set()
        may_go.wait(30)

    def close(self: Memory) -> None:
        closed.append(self)
        close_memory(self)

    monkeypatch.setattr(HostDevice, "prepare", prepare)
    monkeypatch.setattr(Memory, "close", close)
    monkeypatch.setattr(server_module, "_STOP_S", 0.2)
    server = CacheServer(config)
    server.start()
    try:
        assert prepares.wait(10)
        for _ in range(3):
            with pytest.raises(DeadlineError, match="the worker of cpu"):
                server.stop()
            assert not closed
    finally:
        may_go.set()
    eventually(lambda: not any(thread.name == "kvferry-cpu" for thread in threading.enumerate()))
    server.stop()
    assert len(closed) == 1
    server.stop()


def test_an_embedded_server_whose_loop_breaks_says_so(config: ServerConfig) -> None:
    server = CacheServer(config)
    server.start()
    with CacheClient(config.socket_path) as client:
        server._loop._on_tick = lambda now: 1 / 0
        eventually(server._stopped.is_set)
        with pytest.raises(KVFerryError, match="the server ended: ZeroDivisionError"):
            server.stop()
        eventually(lambda: not client.connected)
    assert not Path(config.socket_path).exists()
    server.stop()


class Stuck:
    """Mappings that are not unmapped in time, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds = True
        self._drain = process_table().mappings.drain
        monkeypatch.setattr(process_table().mappings, "drain", self.drain)

    def drain(self, timeout_s: float = 10.0) -> None:
        if self.holds:
            raise DeadlineError("1 released mappings were not unmapped within 10 s")
        self._drain(timeout_s)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    return Stuck(monkeypatch)


@pytest.fixture
def server(config: ServerConfig, stuck: Stuck) -> Iterator[CacheServer]:
    with CacheServer(config) as made:
        yield made


def register(client: CacheClient) -> None:
    cache = allocate_shared((2, 64, 16, 8, 8), torch.float32)
    client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format="vllm_flash_attention")


def test_unregistered_is_said_only_when_it_is_so(server: CacheServer, stuck: Stuck) -> None:
    with CacheClient(server.config.socket_path) as client:
        register(client)
        for _ in range(2):
            with pytest.raises(RequestError, match=r"still mapped.*HostIPCWrapper.*1 released.*\[mapped\]"):
                client.unregister()
            client.ping()
        stuck.holds = False
        client.unregister()
        register(client)


def test_a_session_ends_whose_mappings_stay(server: CacheServer, stuck: Stuck) -> None:
    client = CacheClient(server.config.socket_path)
    register(client)
    with CacheClient(server.config.socket_path) as other:
        client.close()
        eventually(lambda: other.stats()["sessions"] == 1, 5)
        assert other.stats()["engines"] == 0


def test_a_repeated_unregister_waits_too(server: CacheServer, stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped = threading.Event()
    stuck.holds = False
    monkeypatch.setattr(process_table().mappings, "drain", lambda timeout_s: unmapped.wait(timeout_s))
    with CacheClient(server.config.socket_path, timeout_s=0.3) as client:
        register(client)
        for _ in range(2):
            with pytest.raises(DeadlineError):
                client.unregister()
        unmapped.set()
        client.unregister()
