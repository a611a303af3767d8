"""The two kinds of room: a buffer of fixed size, and the pool behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.cuda.memory import host_device_pointer, tensor_from_pointer
from kvferry.cuda.stream import beside_captures
from kvferry.errors import PoolFullError
from kvferry.ipc.shared_memory import tensor_at
from kvferry.p2p.memory import FlatMemory
from kvferry.p2p.memory_pool import TensorMemoryPool
from kvferry.p2p.receive.arena import Arena
from kvferry.p2p.receive.device import DeviceMemory


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

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Flat bytes of it, at least one; `owner` lives as long as any view of them. For any thread."""

    def close(self) -> None:
        """Lend no more; what is lent stays as it is. Idempotent."""


class BufferRegion:
    """Memory that was allocated once: of the host or, with `device`, of a GPU."""

    name = "buffer"

    def __init__(self, nbytes: int, *, device: int | None = None) -> None:
        """Raises CudaError where the GPU has not so much."""
        self._arena = Arena(nbytes)
        self._device = device
        self._owner: object
        if device is None or not nbytes:
            self._owner = memory = torch.empty(nbytes, dtype=torch.uint8)
            self._base = memory.data_ptr()
        else:
            self._owner = lasting = DeviceMemory(device, nbytes)
            self._base = lasting.address

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
        items = tuple((self._base + at, size) for at, size in zip(offsets, sizes, strict=True))
        return FlatMemory(items, self._owner)

    def release(self, memory: FlatMemory) -> None:
        self._arena.release([address - self._base for address, _ in memory.items])

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return _tensor(address, nbytes, self._device, owner)

    def close(self) -> None:
        """The memory goes with the last that uses it."""
        self._owner = None


class PoolRegion:
    """A pool of host memory; owns it. Where it is pinned, its tensors are a GPU's, which reads them over the bus."""

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

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        device = self._pool.device
        at = address if device is None else host_device_pointer(address, device=device)
        return _tensor(at, nbytes, device, owner)

    def close(self) -> None:
        self._pool.close()


def _tensor(address: int, nbytes: int, device: int | None, owner: object) -> torch.Tensor:
    if device is None:
        return tensor_at(address, nbytes, owner)
    with beside_captures(device):
        return tensor_from_pointer(address, nbytes, device=device, owner=owner)
