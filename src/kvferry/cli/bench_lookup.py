"""How long the server takes to say what it holds of a prompt of 16,384 tokens: client call to answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvferry.cli.bench_report import Result
from kvferry.client import CacheClient

__all__ = ["bench_lookup"]

NUM_TOKENS, BLOCK_SIZE = 16_384, 16


def bench_lookup(url: str, device: str, repeats: int) -> list[Result]:
    """Store a prompt's KV (tiny: its size plays no part in a lookup), then look all of it up, again and again.

    Each time as a new request and from a new array, so that nothing is remembered from the time before.
    """
    shape = (2, NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, 1, 8)
    tokens = np.random.default_rng(1).integers(0, 1 << 17, NUM_TOKENS, dtype=np.int32)
    with CacheClient(url) as client:
        client.register_kv_caches(
            {"layers.0": torch.zeros(shape, device=device, dtype=torch.bfloat16)},
            engine_id="bench-lookup",
            model="bench-lookup",
            format="vllm_flash_attention",
        )
        client.store(tokens, list(range(NUM_TOKENS // BLOCK_SIZE))).wait(60)
        ping_ms = statistics.median(_times_ms(lambda _: client.ping(), [None] * repeats))
        about = f"all of {NUM_TOKENS} tokens found; limit: an empty round trip"
        results = []
        for name, prompts in (
            ("lookup_16384", [tokens.copy() for _ in range(repeats)]),
            ("lookup_16384_list", [tokens.tolist() for _ in range(repeats)]),
        ):
            times = _lookup_times_ms(client, name, prompts)
            value = statistics.median(times)
            worst = statistics.quantiles(times, n=100, method="inclusive")[98]
            text = f"{about}; 99th percentile {worst:.3g} ms"
            results.append(Result(name, value, "ms", ping_ms, value / ping_ms, text))
        return results


def _lookup_times_ms(client: CacheClient, name: str, prompts: Sequence[Any]) -> list[float]:
    leases = []

    def look_up(request: tuple[int, Any]) -> None:
        leases.append(client.lookup(f"{name}-{request[0]}", request[1]))

    times = []
    for request in enumerate(prompts):
        times += _times_ms(look_up, [request])
        client.release(leases[-1].lease_id)
    short = [lease.tokens for lease in leases if lease.tokens != NUM_TOKENS]
    if short:
        raise RuntimeError(f"{len(short)} lookups found {short[0]} of {NUM_TOKENS} stored tokens")
    return times


def _times_ms(action: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    times = []
    for argument in arguments:
        started = time.perf_counter()
        action(argument)
        times.append((time.perf_counter() - started) * 1e3)
    return times
