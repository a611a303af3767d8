"""`kvferry bench store`: paged KV to and from the cache server until the data is there, and lookups.

Everything goes through a server in its own process and a client, as in an engine. Block ids are shuffled, tokens are
new in every store (KV that is there already would not be copied again), and the server's pool has been filled once
before anything is timed, so that stores evict, as they do in service.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cli.bench_lookup import bench_lookup
from kvferry.cli.bench_report import Result, rate_result
from kvferry.cli.bench_slowdown import bench_slowdown
from kvferry.cli.children import ServerProcess
from kvferry.cli.sizes import format_bytes
from kvferry.client import CacheClient
from kvferry.ipc import allocate_shared
from kvferry.ipc.flat import storage_bytes
from kvferry.layout import chunk_tokens_for

__all__ = ["PagedKV", "StoreBenchConfig", "run_bench_store"]

MIB = 1 << 20
# The KV shape of an 8B model: 128 KiB a token, 64 planes with blocks of 32 KiB.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 2
CHUNK_BYTES = TOKEN_BYTES * chunk_tokens_for(BLOCK_SIZE)


@dataclasses.dataclass(frozen=True)
class StoreBenchConfig:
    """`sizes_bytes` ascending; the last is reported as `store` and `retrieve`, the others with their size."""

    device: str
    sizes_bytes: tuple[int, ...]
    repeats: int = 5
    lookups: int = 200
    slowdown: bool = False

    def __post_init__(self) -> None:
        odd = [size for size in self.sizes_bytes if size <= 0 or size % CHUNK_BYTES]
        if odd or not self.sizes_bytes:
            raise ValueError(f"sizes {odd} bytes: each must be a multiple of {format_bytes(CHUNK_BYTES)}, one chunk")

    @classmethod
    def for_device(cls, device: str) -> StoreBenchConfig:
        if device == "cuda":
            return cls(device, (8 * MIB, 64 * MIB, 1024 * MIB), repeats=9, slowdown=True)
        return cls(device, (8 * MIB, 64 * MIB, 512 * MIB))

    @property
    def pool_bytes(self) -> int:
        return self.sizes_bytes[-1] * 3 // 2 + 64 * MIB


class Timed(NamedTuple):
    """Median seconds of one size."""

    store_s: float
    retrieve_s: float
    copy_out_s: float
    copy_in_s: float


class PagedKV:
    """A paged KV cache registered with a server, and a plain buffer of the same size to compare with."""

    def __init__(self, device: str, max_bytes: int, client: CacheClient) -> None:
        self.num_blocks = max_bytes // (TOKEN_BYTES * BLOCK_SIZE) * 5 // 4 + 8
        shape = (NUM_LAYERS, 2, self.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.layers = list(torch.randn(shape, device=device, dtype=torch.bfloat16).unbind(0))
        self._client = client
        client.register_kv_caches(
            {f"layers.{index}": layer for index, layer in enumerate(self.layers)},
            engine_id="bench",
            model="bench",
            format="vllm_flash_attention",
        )
        self._random = np.random.default_rng(0)
        self._names = itertools.count()
        # Views of the layers follow a cache that registration has moved to shareable memory.
        self.flat = storage_bytes(self.layers[0])
        self.plain = _plain_buffer(max_bytes, device)

    def new_tokens(self, num_bytes: int) -> npt.NDArray[np.int32]:
        return self._random.integers(0, 1 << 30, num_bytes // TOKEN_BYTES, dtype=np.int32)

    def shuffled_blocks(self, num_tokens: int) -> list[int]:
        blocks: list[int] = self._random.permutation(self.num_blocks)[: num_tokens // BLOCK_SIZE].tolist()
        return blocks

    def store(self, tokens: npt.NDArray[np.int32], blocks: list[int]) -> float:
        """Seconds until all is in the server."""
        started = time.perf_counter()
        self._client.store(tokens, blocks).wait(60)
        return time.perf_counter() - started

    def retrieve(self, tokens: npt.NDArray[np.int32], blocks: list[int]) -> float:
        """Seconds until all is in `blocks`; the lookup before is not timed. Raises where the server lacks some."""
        promise = self._client.lookup(f"bench-{next(self._names)}", tokens)
        if promise.tokens != len(tokens):
            raise RuntimeError(f"{promise.tokens} of {len(tokens)} tokens found right after they were stored")
        try:
            started = time.perf_counter()
            self._client.retrieve(promise.lease_id, blocks).wait(60)
            return time.perf_counter() - started
        finally:
            self._client.release(promise.lease_id)

    def copy_plainly(self, num_bytes: int, *, out: bool) -> float:
        """Seconds of one plain copy of as many bytes between the cache's memory and host memory."""
        paged, plain = self.flat[:num_bytes], self.plain[:num_bytes]
        target, source = (plain, paged) if out else (paged, plain)
        started = time.perf_counter()
        if self.flat.is_cuda:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        return time.perf_counter() - started

    def check(self, num_bytes: int) -> None:
        """Store some blocks and retrieve them elsewhere; raises unless both then hold the same.

        At most half of the cache's blocks, so that there is an elsewhere.
        """
        half = self.num_blocks // 2 * BLOCK_SIZE * TOKEN_BYTES
        num_bytes = min(num_bytes, half // CHUNK_BYTES * CHUNK_BYTES)
        tokens = self.new_tokens(num_bytes)
        blocks = self.shuffled_blocks(2 * len(tokens))
        stored, retrieved = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        self.store(tokens, stored)
        self.retrieve(tokens, retrieved)
        for layer in self.layers:
            if not torch.equal(layer[:, stored], layer[:, retrieved]):
                raise RuntimeError("the retrieved KV differs from what was stored")


def _plain_buffer(num_bytes: int, device: str) -> torch.Tensor:
    """Host memory to copy to and from.

    On the host it starts on a page, as the cache and the server's pool do: memcpy between buffers whose places in a
    page differ by a few bytes runs at a third of its speed, which would make a flattering limit.
    """
    if device == "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return allocate_shared((num_bytes,), torch.uint8).fill_(0)


def run_bench_store(config: StoreBenchConfig) -> list[Result]:
    """All figures. The server has ended when this returns or raises."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-"))
        socket = pathlib.Path(folder) / "server.sock"
        server = stack.enter_context(ServerProcess(socket, config.pool_bytes, config.device))
        results = bench_lookup(server.url, config.device, config.lookups)
        client = stack.enter_context(CacheClient(server.url))
        paged = PagedKV(config.device, config.sizes_bytes[-1], client)
        _fill_pool(paged, config)
        paged.check(config.sizes_bytes[0])
        for size in config.sizes_bytes:
            results += _as_results(size, _time_size(paged, size, config.repeats), last=size == config.sizes_bytes[-1])
        if config.slowdown:
            results.append(bench_slowdown(lambda: _store_once(paged, config.sizes_bytes[-1])))
        return results


def _fill_pool(paged: PagedKV, config: StoreBenchConfig) -> None:
    """Touch every page that will be used, and leave the pool full."""
    size = config.sizes_bytes[-1]
    for _ in range(-(-config.pool_bytes // size)):
        tokens = paged.new_tokens(size)
        paged.store(tokens, paged.shuffled_blocks(len(tokens)))
    paged.retrieve(tokens, paged.shuffled_blocks(len(tokens)))
    for out in (True, False):
        paged.copy_plainly(size, out=out)


def _time_size(paged: PagedKV, size: int, repeats: int) -> Timed:
    """Plain copies take turns with stores and retrieves, so that both meet the same machine."""
    rounds = []
    for _ in range(repeats):
        tokens = paged.new_tokens(size)
        stored = paged.shuffled_blocks(len(tokens))
        copy_out_s = paged.copy_plainly(size, out=True)
        store_s = paged.store(tokens, stored)
        copy_in_s = paged.copy_plainly(size, out=False)
        retrieved = paged.shuffled_blocks(len(tokens))
        rounds.append((store_s, paged.retrieve(tokens, retrieved), copy_out_s, copy_in_s))
    return Timed(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def _store_once(paged: PagedKV, size: int) -> None:
    tokens = paged.new_tokens(size)
    paged.store(tokens, paged.shuffled_blocks(len(tokens)))


def _as_results(size: int, timed: Timed, *, last: bool) -> list[Result]:
    suffix = "" if last else f"_{size // MIB}_mib"
    about = f"{format_bytes(size)} of shuffled {BLOCK_SIZE}-token blocks; limit: one plain copy of as many bytes"
    return [
        rate_result(f"store{suffix}", size, timed.store_s, timed.copy_out_s, about),
        rate_result(f"retrieve{suffix}", size, timed.retrieve_s, timed.copy_in_s, about),
    ]
