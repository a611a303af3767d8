"""Clients that hang up, time out or leave things unfinished: blocks are given back only when no copy can touch them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.errors import DeadlineError, KVFerryError, ServerGoneError
from kvferry.ipc import allocate_shared
from kvferry.layout import KVLayout, Plane
from kvferry.protocol.messages import Closed, Hello, Register, Welcome
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.engines import EngineTable, Geometry
from kvferry.server.net.patience import Patience
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, prompt
from serving.process import Side, Stage, eventually, freeze
from serving.raw import Raw

TOKENS = prompt(1, 8 * CHUNK_TOKENS)
BLOCKS = list(range(8 * CHUNK_BLOCKS))


def register(client: CacheClient, **changes: Any) -> torch.Tensor:
    """A cache of 64 blocks as the engines of these tests have."""
    cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
    names = {"engine_id": "here", "model": "m", "format": "vllm_flash_attention"}
    client.register_kv_caches({"layer": cache}, **{**names, **changes})
    return cache


def _all_stopped(pid: int) -> bool:
    """Whether every thread of the process is in state T."""
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(states) and set(states) == {"T"}


@contextlib.contextmanager
def frozen(server: Side) -> Iterator[None]:
    """The signal returns before all threads have stopped; the body begins only then."""
    freeze(server.pid)
    try:
        eventually(lambda: _all_stopped(server.pid))
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_closing_beside_a_frozen_server_gives_no_block_back(stage: Stage, kind: str) -> None:
    with CacheClient(stage.url, timeout_s=0.3) as client:
        cache = register(client)
        eventually(lambda: client.stats()["memory_bytes"] > 0)
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).view(cache.shape))
        client.store(TOKENS, BLOCKS).wait(10)
        lease = client.lookup("r", TOKENS).lease_id
        with frozen(stage.server):
            job: Any = client.store(prompt(2, CHUNK_TOKENS), [40, 41, 42, 43])
            if kind == "retrieve":
                job = client.retrieve(lease, BLOCKS)
            with pytest.raises(DeadlineError):
                client.ping()
            client.close()
            assert not job.done()
            with pytest.raises(DeadlineError):
                job.wait(0)
        eventually(job.done, 5)
        cache.fill_(7.0)  # the engine uses its blocks again
        time.sleep(0.1)
        assert bool((cache == 7.0).all())
    with CacheClient(stage.url) as client:
        again = register(client)
        found = client.lookup("r", prompt(2, CHUNK_TOKENS))
        if found.tokens:  # it was stored in time, and whole
            client.retrieve(found.lease_id, [0, 1, 2, 3]).wait(10)
            assert not bool((again[:, :4] == 7.0).any())


def test_a_killed_server_ends_all_jobs_and_calls_at_once(stage: Stage) -> None:
    with CacheClient(stage.url) as client:
        register(client)
        eventually(lambda: client.stats()["memory_bytes"] > 0)
        client.store(TOKENS, BLOCKS).wait(10)
        lease = client.lookup("r", TOKENS).lease_id
        freeze(stage.server.pid)
        eventually(lambda: _all_stopped(stage.server.pid))
        jobs: list[Any] = [client.retrieve(lease, BLOCKS), client.store(prompt(3, CHUNK_TOKENS), [0, 1, 2, 3])]
        started = time.monotonic()
        stage.server.kill()
        for job in jobs:
            with pytest.raises(KVFerryError, match="no connection"):
                job.wait(5)
        assert jobs[0].failed_block_ids == tuple(BLOCKS)
        for call in (client.ping, client.stats, lambda: client.attach("here")):
            with pytest.raises(ServerGoneError):
                call()
        assert client.lookup("q", TOKENS) == (0, 0, 0)
        assert time.monotonic() - started < 2


def test_an_unregister_without_an_answer_can_be_repeated(stage: Stage) -> None:
    with CacheClient(stage.url, timeout_s=0.3) as client:
        register(client)
        with frozen(stage.server), pytest.raises(DeadlineError):
            client.unregister()
        eventually(lambda: answers(client))
        client.unregister()
        register(client)


def answers(client: CacheClient) -> bool:
    try:
        client.ping()
    except DeadlineError:
        return False
    return True


def test_a_client_that_hangs_up_by_half_is_told_when_it_is_over(stage: Stage) -> None:
    raw = Raw(stage.path, Hello(1, 1))
    assert isinstance(raw.reply(), Welcome)
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.until_end() == [Closed("the client hung up")]
    raw.close()


BAD_CALLS: dict[str, Callable[[CacheClient], object]] = {
    "start": lambda client: client.store(TOKENS, BLOCKS, -CHUNK_TOKENS),
    "no time": lambda client: client.store(TOKENS, BLOCKS, timeout_s=0),
    "much time": lambda client: client.retrieve(1, BLOCKS, timeout_s=1e9),
    "no name": lambda client: client.lookup("", TOKENS),
    "long name": lambda client: client.lookup("r" * 513, TOKENS),
    "lease": lambda client: client.retrieve(-1, BLOCKS),
    "large lease": lambda client: client.release(1 << 62),
    "engine": lambda client: client.attach(""),
}


def test_what_no_server_takes_is_refused_here_and_the_session_lives(stage: Stage) -> None:
    with CacheClient(stage.url) as client:
        register(client)
        for name, call in BAD_CALLS.items():
            for _ in range(65):  # more than there are events
                with pytest.raises(ValueError, match=r"^(Store|Retrieve|Lookup|Release): Expected|^engine_id is ''"):
                    call(client)
            client.ping()
            assert client.stats()["sessions_broken"] == 0, name


def test_no_time_at_all_is_no_time_limit(stage: Stage) -> None:
    for timeout_s in (0, -1.0):
        with pytest.raises(ValueError, match="timeout_s"):
            CacheClient(stage.url, timeout_s=timeout_s)


@pytest.mark.parametrize("data", [b"", b"\x10", b"\x10\0\0\0half a fr"])
def test_a_frame_that_is_never_finished_ends_its_session(tmp_path: Path, data: bytes) -> None:
    path = str(tmp_path / "s")
    config = ServerConfig(socket_path=path, memory_bytes=1 << 20, device="cpu")
    with CacheServer(config, patience=Patience(frame_s=0.3, greeting_s=0.3)):
        raw = Raw(path, *([Hello(1, 1)] if data else []))
        if data:
            assert isinstance(raw.reply(), Welcome)
        raw.socket.sendall(data)
        with CacheClient(path) as client:  # says nothing for longer than that, but owes nothing
            assert isinstance(raw.until_end()[-1], Closed)
            client.ping()
        raw.close()


def test_chunks_of_another_size_have_another_name() -> None:
    """Two clients of one model may cut it differently; neither may be given a slot of the other's."""
    layout = KVLayout(
        format="f", block_size=16, num_blocks=8, dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1,
        planes=(Plane(0, 0, 64, 64),),
    )  # fmt: skip
    spaces = set()
    for chunk_tokens in (64, 128):
        message = Register(1, "e", "m", 0, 1, chunk_tokens, "", layout, b"")
        spaces.add(EngineTable().claim("uid:0", message, 1).ranks[0].space)
        assert Geometry.of(message).chunk_tokens == chunk_tokens
    assert len(spaces) == 2
