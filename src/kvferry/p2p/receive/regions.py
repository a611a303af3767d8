"""The two kinds of room: a buffer of fixed size, and the pool behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.errors import PoolFullError
from kvferry.p2p.memory import FlatMemory
from kvferry.p2p.memory_pool import TensorMemoryPool
from kvferry.p2p.receive.arena import Arena


class Region(Protocol):
    """Memory of which parts are lent."""

    name: str

    @property
    def total_bytes(self) -> int:
        """All that it has."""

    @property
    def used_bytes(self) -> int:
        """What is lent, with what is lost to alignment."""

    def could_ever(self, sizes: Sequence[int]) -> bool:
        """Whether parts of those sizes fit when nothing is lent."""

    def reserve(self, sizes: Sequence[int]) -> FlatMemory | None:
        """Parts of those sizes: all of them, or None. The memory lives as long as its owner."""

    def release(self, memory: FlatMemory) -> None:
        """Take them back."""

    def close(self) -> None:
        """Lend no more; what is lent stays as it is. Idempotent."""


class BufferRegion:
    """A tensor of bytes that was allocated once."""

    name = "buffer"

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._arena = Arena(memory.numel())

    @property
    def total_bytes(self) -> int:
        return self._arena.nbytes

    @property
    def used_bytes(self) -> int:
        return self._arena.nbytes - self._arena.free_bytes

    def could_ever(self, sizes: Sequence[int]) -> bool:
        return self._arena.could_ever(sizes)

    def reserve(self, sizes: Sequence[int]) -> FlatMemory | None:
        offsets = self._arena.reserve(sizes)
        if offsets is None:
            return None
        base = self._memory.data_ptr()
        return FlatMemory(tuple((base + at, size) for at, size in zip(offsets, sizes, strict=True)), self._memory)

    def release(self, memory: FlatMemory) -> None:
        base = self._memory.data_ptr()
        self._arena.release([address - base for address, _ in memory.items])

    def close(self) -> None:
        """The memory goes with the last that uses it."""


class PoolRegion:
    """A pool of host memory; owns it."""

    name = "pool"

    def __init__(self, pool: TensorMemoryPool) -> None:
        self._pool = pool
        self._largest_bytes = pool.largest_free_bytes

    @property
    def total_bytes(self) -> int:
        return self._pool.pool_bytes

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def could_ever(self, sizes: Sequence[int]) -> bool:
        blocks = [self._pool.block_bytes(size) for size in sizes]
        return sum(blocks) <= self._pool.pool_bytes and max(blocks) <= self._largest_bytes

    def reserve(self, sizes: Sequence[int]) -> FlatMemory | None:
        """The largest first, so that all get in where they can."""
        addresses: dict[int, int] = {}
        try:
            for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
                addresses[item] = self._pool.allocate(max(1, sizes[item]))
        except PoolFullError:
            for address in addresses.values():
                self._pool.free(address)
            return None
        items = tuple((addresses[item], size) for item, size in enumerate(sizes))
        return FlatMemory(items, [self._pool.view(address) for address, _ in items])

    def release(self, memory: FlatMemory) -> None:
        for address, _ in memory.items:
            self._pool.free(address)

    def close(self) -> None:
        self._pool.close()
