"""The end of a server: what is late or failed is told, and no memory is given back that may still be used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.errors import DeadlineError, KVFerryError, RequestError
from kvferry.ipc import allocate_shared, process_table
from kvferry.server import CacheServer, ServerConfig, assembly
from kvferry.server import server as server_module
from kvferry.server.memory import Memory
from kvferry.server.tiers.lower_tiers import LowerTiers
from kvferry.server.work import unmapping as unmapping_module
from kvferry.server.work.device import HostDevice
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


class Interrupted(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("in_time", [True, False])
def test_a_start_that_is_broken_off_unmaps_nothing_that_is_being_filled(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    may_go, prepares = threading.Event(), threading.Event()
    steps: list[str] = []
    close_memory = Memory.close

    def prepare(self: HostDevice, address: int, nbytes: int) -> None:
        prepares.set()
        may_go.wait(0.5 if in_time else 30)
        steps.append("filled")

    def close(self: Memory) -> None:
        steps.append("closed")
        close_memory(self)

    def interrupt(self: LowerTiers) -> None:
        assert prepares.wait(10)
        raise Interrupted

    monkeypatch.setattr(HostDevice, "prepare", prepare)
    monkeypatch.setattr(Memory, "close", close)
    monkeypatch.setattr(LowerTiers, "start", interrupt)
    monkeypatch.setattr(assembly, "_STOP_S", 10.0 if in_time else 0.2)
    try:
        with pytest.raises(Interrupted):
            CacheServer(config).start()
        assert steps == (["filled", "closed"] if in_time else [])
    finally:
        may_go.set()
    eventually(lambda: not any(thread.name == "kvferry-cpu" for thread in threading.enumerate()))
    assert not Path(config.socket_path).exists()


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
    """Mappings that are not unmapped until they are let go, under a worker that gives up on them soon."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds = True
        self._unmapping = process_table().mappings.unmapping
        monkeypatch.setattr(process_table().mappings, "unmapping", self.unmapping)
        monkeypatch.setattr(unmapping_module, "_LIMIT_S", 0.3)

    def unmapping(self) -> Callable[[], bool]:
        ended = self._unmapping()
        return lambda: not self.holds and ended()


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
            with pytest.raises(RequestError, match=r"still mapped, after 0.3 s.*HostIPCWrapper.*\[mapped\]"):
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
    monkeypatch.setattr(unmapping_module, "_LIMIT_S", 30.0)
    with CacheClient(server.config.socket_path, timeout_s=0.3) as client:
        register(client)
        for _ in range(2):
            with pytest.raises(DeadlineError):
                client.unregister()
        stuck.holds = False
        client.unregister()


def test_memory_that_is_slow_to_unmap_holds_up_no_other_engine(server: CacheServer, stuck: Stuck) -> None:
    with CacheClient(server.config.socket_path) as other, CacheClient(server.config.socket_path) as doomed:
        cache = allocate_shared((2, 64, 16, 8, 8), torch.float32)
        other.register_kv_caches({"layer": cache}, engine_id="o", model="m", format="vllm_flash_attention")
        eventually(lambda: other.stats()["memory_bytes"] > 0)
        register(doomed)
        ending = threading.Thread(target=doomed.close, daemon=True)
        ending.start()
        eventually(lambda: other.stats()["engines"] == 1)
        assert other.store(list(range(64)), [0, 1, 2, 3]).wait(10).num_stored == 1
        assert other.stats()["sessions"] == 2  # that of the other is still ending
        stuck.holds = False
        ending.join(20)
        eventually(lambda: other.stats()["sessions"] == 1)
