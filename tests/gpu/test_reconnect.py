"""Engines on a GPU outlive their servers: bytes, memory, and the graphs that they capture meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles.vmm_pool import VmmPool
from kvferry.client import CacheClient
from kvferry.cuda.memory import memory_info
from kvferry.ipc import IPCPolicy
from serving.engine_side import CHUNK_TOKENS, FORMAT, link_of
from serving.process import Stage, Zygote, eventually
from serving.reconnecting import NUM_BYTES, SHAPE, check_reconnects, kill_and_restart

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
OTHERS = list(range(40, 52))
TOKENS = 3 * CHUNK_TOKENS
MIB = 1 << 20
NUM_KILLS = 10


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, device="cuda")
    yield made
    made.close()


def test_ten_kills(stage: Stage) -> None:
    """The engine asks all the time, and gets its bytes back from each server; no GPU memory is lost on the way."""
    engine = stage.engine(device="cuda:0")
    stage.wait_for_memory(engine)
    engine.call("impatient")
    engine.call("keep_asking", seed=1, num_tokens=TOKENS)
    dice = random.Random(1)
    free: list[int] = []
    for number in range(NUM_KILLS):
        want = engine.call("fill", blocks=BLOCKS, seed=number)["digest"]
        assert engine.call("store", seed=number, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
        found = engine.call("lookup", seed=number, num_tokens=TOKENS, request=f"seed {number}")
        assert engine.call("retrieve", lease=found["lease"], blocks=OTHERS) == {"failed": [], "error": None}
        assert engine.call("digest", blocks=OTHERS)["digest"] == want
        free.append(memory_info(0)[0])
        engine.call("store", seed=1000 + number, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
        time.sleep(dice.random() * 0.002)
        kill_and_restart(stage)
        assert engine.call("job")["done"]
        eventually(lambda: bool(engine.call("connected")["connected"]), 20)
        stage.wait_for_memory(engine)
    asked = engine.call("stop_asking")
    assert asked["errors"] == []
    assert asked["hits"] > 0
    assert asked["misses"] > 0
    # The second server comes beside an engine that has events and tables of its own by now: growth counts from it on.
    assert min(free[1:]) >= free[1] - 32 * MIB, free


@pytest.mark.parametrize("isolated_ipc", [False, True])
@pytest.mark.parametrize("kind", ["raw", "torch", "vmm"])
def test_memory_of_each_kind_goes_to_one_server_after_the_other(stage: Stage, kind: str, isolated_ipc: bool) -> None:
    pool = VmmPool(NUM_BYTES) if kind == "vmm" else None
    flat = pool.tensor() if pool is not None else torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:0")
    check_reconnects(stage, flat, IPCPolicy(kind, isolated_ipc), rounds=5)
    del flat
    torch.cuda.synchronize()
    if pool is not None:
        pool.close()


@pytest.mark.parametrize("lost", ["connection", "server"])
def test_a_registration_in_the_background_spoils_no_capture(stage: Stage, lost: str) -> None:
    cache = torch.zeros(SHAPE, device="cuda:0")
    with CacheClient(stage.url) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format=FORMAT)
        ones = torch.ones(1024, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the mode in which no other thread may make unsafe calls
            twos = ones * 2
            if lost == "server":
                kill_and_restart(stage)
            else:
                link_of(client)._hang_up("lost by the test")
            eventually(lambda: client.connected, 20)
            threes = twos + ones
        ones.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        assert threes.tolist() == [6.0] * 1024
        assert client.stats()["engines"] == 1
