"""CUDA virtual memory as torch's expandable segments make it: a range of many physical chunks."""

from __future__ import annotations

import contextlib

import torch

from kvferry.cuda.device import bound
from kvferry.cuda.memory import HandleType, tensor_from_pointer


class VmmPool:
    """`nbytes` mapped as chunks of `chunk_bytes` each, in a reservation twice as large."""

    def __init__(
        self, nbytes: int, *, device: int = 0, chunk_bytes: int = 2 << 20, types: HandleType = HandleType.POSIX_FD
    ) -> None:
        self.device = device
        self.nbytes = -(-nbytes // chunk_bytes) * chunk_bytes
        with bound(device) as drv, contextlib.ExitStack() as undo:
            self.base = drv.address_reserve(2 * self.nbytes)
            undo.callback(drv.address_free, self.base, 2 * self.nbytes)
            for address in range(self.base, self.base + self.nbytes, chunk_bytes):
                handle = drv.mem_create(chunk_bytes, device, types)
                try:
                    drv.mem_map(address, chunk_bytes, handle)
                finally:
                    drv.mem_release(handle)
                undo.callback(drv.mem_unmap, address, chunk_bytes)
            drv.set_access(self.base, self.nbytes, device)
            self._undo = undo.pop_all()

    def tensor(self) -> torch.Tensor:
        """All of it as flat bytes; must not be used after `close`."""
        return tensor_from_pointer(self.base, self.nbytes, device=self.device, owner=self)

    def close(self) -> None:
        with bound(self.device):
            self._undo.close()
