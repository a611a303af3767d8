"""Gather and scatter of paged GPU blocks to and from pinned memory, beside one plain pinned copy of the same bytes.

Usage: python benchmarks/copy_cuda.py [--rounds 7]
Prints one JSON object; rates are medians in GB/s, planning included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvferry.copy import ChunkMap, CudaCopier
from kvferry.layout import KVLayout, Plane

LAYERS = 32
CHUNK_BYTES = 8 << 20


def make_layout(block_bytes: int, num_blocks: int) -> KVLayout:
    planes = tuple(
        Plane(0, layer * num_blocks * block_bytes, block_bytes, block_bytes)
        for layer in range(LAYERS if block_bytes < 1 << 20 else 1)
    )
    return KVLayout(
        format="bench",
        block_size=16,
        num_blocks=num_blocks,
        dtype="uint8",
        num_layers=len(planes),
        num_kv_heads=1,
        head_dim=1,
        planes=planes,
    )


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(copier: CudaCopier, nbytes: int, block_bytes: int, rounds: int) -> list[dict[str, object]]:
    """Rates for one size of copy and of block, shuffled; each limit is measured in turn with them."""
    planes = LAYERS if block_bytes < 1 << 20 else 1
    per_chunk = max(1, min(CHUNK_BYTES, nbytes) // (planes * block_bytes))
    num_chunks = nbytes // (planes * block_bytes * per_chunk)
    num_blocks = 2 * num_chunks * per_chunk
    layout = make_layout(block_bytes, num_blocks)
    cache = torch.randint(0, 256, (num_blocks * layout.block_bytes,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    dense = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    ids = np.random.default_rng(7).permutation(num_blocks)[: num_chunks * per_chunk]
    flats = pinned.data_ptr() + np.random.default_rng(8).permutation(num_chunks) * (per_chunk * layout.block_bytes)
    chunk_map = ChunkMap(layout, [cache.data_ptr()], per_chunk)
    calls: dict[str, Callable[[], object]] = {
        "d2h": lambda: pinned.copy_(dense, non_blocking=True),
        "gather": lambda: copier.gather(chunk_map.plan(ids, flats)),
        "h2d": lambda: dense.copy_(pinned, non_blocking=True),
        "scatter": lambda: copier.scatter(chunk_map.plan(ids, flats)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            seconds[name].append(timed(call))
    rates = {name: nbytes / statistics.median(taken[1:]) / 1e9 for name, taken in seconds.items()}
    return [
        {
            "name": f"{name}_{nbytes >> 20}_MiB_of_{block_bytes >> 10}_KiB",
            "value": round(rates[name], 2),
            "unit": "GB/s",
            "limit": round(rates[limit], 2),
            "ratio": round(rates[name] / rates[limit], 4),
        }
        for name, limit in (("gather", "d2h"), ("scatter", "h2d"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    results = []
    with CudaCopier(0) as copier:
        copier.warm()
        for block_bytes in (4 << 10, 16 << 10, 64 << 10, 4 << 20):
            for nbytes in (8 << 20, 64 << 20, 1 << 30):
                results += measure(copier, nbytes, block_bytes, options.rounds)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"bench": "copy_cuda", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
