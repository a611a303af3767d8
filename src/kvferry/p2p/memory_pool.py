"""Pinned host memory for tensors that do not fit elsewhere."""

from __future__ import annotations

import math
import resource
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from kvferry.cuda.memory import register_host, unregister_host
from kvferry.errors import CudaError, NotContiguousError, PoolAddressError, PoolFullError, ShareError
from kvferry.ipc.shared_memory import Segment
from kvferry.p2p.buddy import BuddyAllocator

MIN_BLOCK_BYTES = 4096


class TensorMemoryPool:
    """A fixed amount of host memory, given out in blocks of 4 KiB times a power of two (buddy allocation).

    All is allocated at the start and, with `device`, pinned for all GPUs, which takes half a second a GiB. Without a
    device it is plain memory, for machines that have none. What is given out is known by its address. Freed halves
    join again, so that when all is freed the pool is as it was; between, a tensor takes up to twice its bytes.

    For any thread: the books are changed under a lock, copies are made without it. An address belongs to who got it:
    nobody else frees it, and it is not freed while something still copies from or to it.
    """

    def __init__(self, pool_bytes: int, *, device: int | None = None) -> None:
        self._lock = threading.Lock()  # for the books, and `_requested`
        self._books = BuddyAllocator(pool_bytes, MIN_BLOCK_BYTES)
        self._requested: dict[int, int] = {}  # address -> bytes asked for
        self._closed = False
        self._undo = ExitStack()
        segment = Segment(self._books.pool_bytes)
        self._memory = segment.tensor()
        self._base = segment.address
        segment.close()  # of the file, which nobody else opens; the tensor keeps the memory
        self.device = device
        if device is not None:
            self._pin(device)

    @property
    def pool_bytes(self) -> int:
        return self._books.pool_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks given out, so at least what was asked for."""
        with self._lock:
            return self._books.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest tensor that would fit now."""
        with self._lock:
            return self._books.largest_free

    @property
    def num_tensors(self) -> int:
        with self._lock:
            return self._books.num_blocks

    def block_bytes(self, nbytes: int) -> int:
        """What an allocation of so many bytes takes of the pool."""
        return self._books.block_size(nbytes)

    def allocate(self, nbytes: int) -> int:
        """The address of memory for so many bytes, to be filled by the caller.

        Raises:
            PoolFullError: no free block is large enough, or the pool is closed.
        """
        if nbytes <= 0:
            raise ValueError(f"an allocation has at least one byte, got {nbytes}")
        with self._lock:
            offset = None if self._closed else self._books.allocate(nbytes)
            if offset is None:
                raise PoolFullError(self._why_full(nbytes))
            self._requested[self._base + offset] = nbytes
        return self._base + offset

    def free(self, address: int) -> None:
        """Take back what is at that address.

        Raises:
            PoolAddressError: it is no address that the pool gave out, or it was freed already. Nothing was changed.
        """
        with self._lock:
            if self._requested.pop(address, None) is None:
                raise PoolAddressError(self._why_unknown(address))
            known = self._books.free(address - self._base)
        assert known

    def view(self, address: int) -> torch.Tensor:
        """The bytes at that address, as many as were asked for, as a flat `uint8` tensor; not for use after `free`."""
        with self._lock:
            if address not in self._requested:
                raise PoolAddressError(self._why_unknown(address))
            nbytes = self._requested[address]
            return self._memory.narrow(0, address - self._base, nbytes)

    def store_tensor(self, tensor: torch.Tensor) -> int:
        """Copy a tensor, of whatever device, into the pool; its address. Returns when the bytes are there.

        In the order of the device's current stream.

        Raises:
            NotContiguousError: its bytes are not one dense run.
            PoolFullError: there is no room.
        """
        if not tensor.is_contiguous() or tensor.numel() == 0:
            raise NotContiguousError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not one dense run of bytes"
            )
        address = self.allocate(tensor.numel() * tensor.element_size())
        try:
            self.view(address).copy_(tensor.detach().reshape(-1).view(torch.uint8))
        except BaseException:
            self.free(address)
            raise
        return address

    def load_tensor(
        self, address: int, dtype: torch.dtype, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """A new tensor on `device` with the bytes at that address, which stay in the pool until `free`.

        Raises:
            PoolAddressError: it is no address that the pool gave out, or it was freed.
            ValueError: dtype and shape are of another number of bytes than what is there.
        """
        stored = self.view(address)
        if math.prod(shape) * dtype.itemsize != len(stored):
            raise ValueError(f"{len(stored)} bytes at {address:#x} are no {dtype} tensor of shape {tuple(shape)}")
        loaded = torch.empty(tuple(shape), dtype=dtype, device=device)
        loaded.reshape(-1).view(torch.uint8).copy_(stored)
        return loaded

    def close(self) -> None:
        """Unpin and give the memory back, whatever is in it; idempotent. Nothing may be copying from or to it."""
        with self._lock:
            self._closed = True
            self._requested.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)
            undo, self._undo = self._undo, ExitStack()
        undo.close()

    def __enter__(self) -> TensorMemoryPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        kind = "plain" if self.device is None else "pinned"
        state = "closed" if self._closed else f"{self._books.used_bytes} in use"
        return f"<TensorMemoryPool of {self.pool_bytes} bytes, {kind}, {state}>"

    def _pin(self, device: int) -> None:
        """Each of the largest blocks by itself, so that no copy ever spans two pinned pieces."""
        for offset, nbytes in self._books.largest_blocks():
            address = self._base + offset
            try:
                register_host(address, nbytes, device=device)
            except CudaError as error:
                self.close()
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
                raise ShareError(
                    f"{nbytes} bytes of a pool of {self.pool_bytes} cannot be pinned: {error}; the limit of locked "
                    f"memory (memlock, `ulimit -l`) is {limit}, and a container may have less: make the pool smaller"
                ) from error
            self._undo.callback(unregister_host, address, device=device)

    def _why_full(self, nbytes: int) -> str:
        if self._closed:
            return "the pool is closed"
        return (
            f"{nbytes} bytes need a block of {self._books.block_size(nbytes)}; of the pool's {self.pool_bytes} bytes "
            f"{self._books.used_bytes} are in use, and the largest free block has {self._books.largest_free}"
        )

    def _why_unknown(self, address: int) -> str:
        if self._closed:
            return "the pool is closed"
        return f"{address:#x} is not the address of anything in this pool: never given out, or freed already"
