"""Engines whose layers have other names, or come in another order, share no KV."""

from __future__ import annotations

import time

import torch

from kvferry.client import CacheClient
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
from serving.process import Stage


def register(client: CacheClient, engine_id: str, names: list[str]) -> None:
    caches = {name: torch.zeros(2, 8, BLOCK_SIZE, 2, 8) for name in names}
    client.register_kv_caches(caches, engine_id=engine_id, model="m", format=FORMAT)


def test_layers_in_another_order_are_never_swapped(stage: Stage) -> None:
    tokens = prompt(1, CHUNK_TOKENS)
    with CacheClient(stage.url) as first:
        register(first, "first", ["l1", "l0"])
        deadline = time.monotonic() + 30
        while not first.store(tokens, range(CHUNK_BLOCKS)).wait().num_stored and time.monotonic() < deadline:
            time.sleep(0.05)  # the server's memory is being made
        for engine_id, names, found in (
            ("order", ["l0", "l1"], 0),
            ("names", ["l1", "l2"], 0),
            ("same", ["l1", "l0"], CHUNK_TOKENS),
        ):
            with CacheClient(stage.url) as other:
                register(other, engine_id, names)
                assert other.lookup("r", tokens).tokens == found, engine_id
