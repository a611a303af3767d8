"""Gather and scatter of paged blocks between two shared-memory mappings, beside one plain memcpy of the same bytes.

Usage: python benchmarks/copy_host.py [--mib 512] [--rounds 7]     Prints one JSON object; rates are medians in GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvferry.copy import ChunkMap, HostCopier
from kvferry.layout import KVLayout, Plane

BLOCKS_PER_CHUNK = 4


class SharedBytes:
    """A memfd mapping whose pages are all in place."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self._mapping = mmap.mmap(fd, nbytes)
        os.close(fd)
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.bytes[:] = 1
        self.address = self.bytes.ctypes.data


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(nbytes: int, block_bytes: int, rounds: int) -> list[dict[str, object]]:
    """Rates of gather and scatter for one block size; the limit is measured in turn with them."""
    paged, flat = SharedBytes(nbytes), SharedBytes(nbytes)
    num_blocks = nbytes // block_bytes
    layout = KVLayout(
        format="bench",
        block_size=16,
        num_blocks=num_blocks,
        dtype="uint8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        planes=(Plane(0, 0, block_bytes, block_bytes),),
    )
    ids = np.random.default_rng(7).permutation(num_blocks)
    chunks = flat.address + np.arange(num_blocks // BLOCKS_PER_CHUNK) * block_bytes * BLOCKS_PER_CHUNK
    chunk_map = ChunkMap(layout, [paged.address], BLOCKS_PER_CHUNK)
    copier = HostCopier()
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(flat.address, paged.address, nbytes),
        "gather": lambda: copier.gather(chunk_map.plan(ids, chunks)),
        "scatter": lambda: copier.scatter(chunk_map.plan(ids, chunks)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(lambda call=call: call()))
    rates = {name: nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    return [
        {
            "name": f"{name}_{block_bytes >> 10}_KiB",
            "value": round(rates[name], 2),
            "unit": "GB/s",
            "limit": round(rates["memcpy"], 2),
            "ratio": round(rates[name] / rates["memcpy"], 3),
        }
        for name in ("gather", "scatter")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    results = []
    for block_bytes in (16 << 10, 64 << 10, 256 << 10):
        results += measure(options.mib << 20, block_bytes, options.rounds)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({"bench": "copy_host", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
