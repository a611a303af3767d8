"""One engine in the test's own process, through several servers, with memory of any kind."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.client import CacheClient
from kvferry.ipc import IPCPolicy
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, link_of, prompt
from serving.process import Stage, eventually

NUM_BLOCKS = 64
SHAPE = (2, NUM_BLOCKS, BLOCK_SIZE, 8, 8)
NUM_BYTES = 2 * NUM_BLOCKS * BLOCK_SIZE * 8 * 8 * 4
TOKENS = prompt(1, 3 * CHUNK_TOKENS)
BLOCKS = list(range(3 * CHUNK_BLOCKS))
OTHERS = list(range(40, 40 + 3 * CHUNK_BLOCKS))


def kill_and_restart(stage: Stage) -> None:
    """Another server at the same place."""
    stage.server.kill()
    eventually(lambda: not stage.server.alive)
    stage.start_server()


def check_reconnects(stage: Stage, flat: torch.Tensor, policy: IPCPolicy, *, rounds: int = 3, **config: Any) -> None:
    """`flat` (bytes) is the KV cache: it stays as it is, whatever server maps it, and each gives back its bytes."""
    cache = flat[:NUM_BYTES].view(torch.float32).view(SHAPE)
    cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).view(SHAPE))
    cache[:, OTHERS] = -1.0
    before = cache.clone()
    with CacheClient(stage.url) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format=FORMAT, policy=policy, **config)
        for number in range(rounds):
            if number % 2:
                link_of(client)._hang_up("lost by the test")
            elif number:
                kill_and_restart(stage)
            eventually(lambda: client.connected and client.stats()["memory_bytes"] >= 16 << 20, 20)
            assert torch.equal(cache, before)
            client.store(TOKENS, BLOCKS).wait(10)
            client.retrieve(client.lookup(f"request {number}", TOKENS).lease_id, OTHERS).wait(10)
            assert torch.equal(cache[:, OTHERS], before[:, BLOCKS])
            cache[:, OTHERS] = -1.0
            assert client.stats()["engines"] == 1
        client.unregister()
        assert stage.server.call("mappings")["mapped"] == 0
