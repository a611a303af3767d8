"""Memory of each kind goes to one server after the other: its handles and descriptors are given again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles.fake_cuda import installed
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.ipc import IPCPolicy, allocate_shared
from serving.engine_side import CHUNK_TOKENS
from serving.process import Stage, Zygote, eventually
from serving.reconnecting import BLOCKS, NUM_BYTES, OTHERS, check_reconnects
from serving.tcp import tcp_stage

TOKENS = 3 * CHUNK_TOKENS


@pytest.fixture(params=["host", "raw", "vmm"])
def flat(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """Bytes of that kind, on the host or over the driver's double."""
    if request.param == "host":
        yield allocate_shared((NUM_BYTES,), torch.uint8)
        return
    with installed():
        if request.param == "raw":
            with bound(0) as driver:
                address = driver.mem_alloc(NUM_BYTES)
            yield tensor_from_pointer(address, NUM_BYTES, device=0, owner=None)
            return
        pool = VmmPool(NUM_BYTES)
        yield pool.tensor()
        pool.close()


@pytest.mark.parametrize("isolated_ipc", [False, True])
def test_one_server_after_the_other(zygote: Zygote, tmp_path: Path, flat: torch.Tensor, isolated_ipc: bool) -> None:
    stage = Stage(zygote, tmp_path, device="cuda", double=True)
    try:
        check_reconnects(stage, flat, IPCPolicy(isolated_ipc=isolated_ipc))
    finally:
        stage.close()


def test_over_tcp_by_its_token_at_the_same_port(zygote: Zygote, tmp_path: Path) -> None:
    """No descriptor travels; killed, and silent."""
    with tcp_stage(zygote, tmp_path, device="cuda", double=True, patience={"heartbeat_s": 1.0}) as tcp:
        engine = tcp.engine(device="double")
        tcp.stage._config["listen"] = tcp.url
        for how in (signal.SIGKILL, signal.SIGSTOP):
            tcp.stage.wait_for_memory(engine)
            want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
            engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
            found = engine.call("lookup", seed=1, num_tokens=TOKENS)
            assert engine.call("retrieve", lease=found["lease"], blocks=OTHERS)["failed"] == []
            assert engine.call("digest", blocks=OTHERS)["digest"] == want
            os.kill(tcp.stage.server.pid, how)
            eventually(lambda: not engine.call("connected")["connected"])
            tcp.stage.server.kill()
            eventually(lambda: not tcp.stage.server.alive)
            assert engine.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == 0
            tcp.stage.start_server()
            eventually(lambda: bool(engine.call("connected")["connected"]))
        assert engine.call("stats")["stats"]["engines"] == 1
        assert tcp.mapped() == 2
