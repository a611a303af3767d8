"""Engines on a GPU that reach the server over TCP: memory and events by handles alone, silence, death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda.memory import memory_info
from serving.engine_side import CHUNK_TOKENS
from serving.process import SideError, Zygote, eventually
from serving.tcp import TcpStage, tcp_stage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
TARGET = list(range(40, 52))
TOKENS = 3 * CHUNK_TOKENS
BIG_BLOCKS = 65_536  # 1 GiB


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def gpus(zygote: Zygote, tmp_path: Path) -> Iterator[TcpStage]:
    with tcp_stage(zygote, tmp_path, device="cuda", memory_bytes=64 << 20, patience={"heartbeat_s": 1.0}) as made:
        yield made


def test_what_one_engine_stores_another_retrieves(gpus: TcpStage) -> None:
    first = gpus.engine(register={"engine_id": "a"}, device="cuda:0")
    gpus.stage.wait_for_memory(first)
    want = first.call("fill", blocks=BLOCKS, seed=1)["digest"]
    assert first.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
    other = gpus.engine(register={"engine_id": "b"}, device="cuda:0")
    found = other.call("lookup", seed=1, num_tokens=TOKENS)
    assert other.call("retrieve", lease=found["lease"], blocks=TARGET)["failed"] == []
    assert other.call("digest", blocks=TARGET)["digest"] == want


def test_a_store_waits_for_the_engines_stream(gpus: TcpStage) -> None:
    """The event lies in the engine's device memory; the server sees it there, and only when it has happened."""
    engine = gpus.engine(device="cuda:0")
    gpus.stage.wait_for_memory(engine)
    want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
    engine.call("spin", seconds=2)
    engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
    assert engine.call("job", within_s=0.01)["done"] is False
    assert engine.call("job", within_s=20)["error"] == ""
    found = engine.call("lookup", seed=1, num_tokens=TOKENS)
    assert engine.call("retrieve", lease=found["lease"], blocks=TARGET)["failed"] == []
    assert engine.call("digest", blocks=TARGET)["digest"] == want


def test_memory_is_back_after_death_and_after_silence(gpus: TcpStage) -> None:
    watcher = gpus.engine(register={"engine_id": "watcher"}, device="cuda:0")
    gpus.stage.wait_for_memory(watcher)
    free, _ = memory_info(0)
    for stop in (signal.SIGKILL, signal.SIGSTOP):
        victim = gpus.engine(register={"engine_id": "victim"}, device="cuda:0", num_blocks=BIG_BLOCKS)
        mapped = gpus.mapped()
        victim.call("spin", seconds=20)
        victim.call("store", seed=1, num_tokens=64 * CHUNK_TOKENS, blocks=list(range(256)), wait=False)
        os.kill(victim.pid, stop)
        if stop == signal.SIGSTOP:
            eventually(lambda mapped=mapped: gpus.mapped() < mapped, 10)  # type: ignore[misc]
            os.kill(victim.pid, signal.SIGKILL)
        eventually(lambda: memory_info(0)[0] >= free - (64 << 20), 10)


def test_memory_of_other_kinds_is_refused_by_name(gpus: TcpStage) -> None:
    engine = gpus.engine(register={}, device="cpu")
    with pytest.raises(SideError, match=r"TCP carries none.*\[transport\]"):
        engine.call("register")
