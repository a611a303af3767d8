"""Memory of a GPU, and copies from and to it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack

from kvferry.cuda.device import bound
from kvferry.cuda.driver import load_driver
from kvferry.cuda.stream import Stream, beside_captures
from kvferry.p2p.carriers.runs import Int64s


class DeviceMemory:
    """Allocated once, and freed with the last that keeps it."""

    def __init__(self, device: int, nbytes: int) -> None:
        """Raises CudaError where there is not so much."""
        with beside_captures(device), bound(device) as drv:
            self.address = drv.mem_alloc(nbytes)
        weakref.finalize(self, _free, device, self.address).atexit = False


class DeviceRows:
    """Copies rows (target, source, bytes) between any two of a GPU's and the host's memory. For one thread."""

    def __init__(self, device: int) -> None:
        """Raises CudaError."""
        self._device = device
        self._undo = ExitStack()
        with beside_captures(device):
            self._stream = self._undo.enter_context(Stream(device))

    def copy_rows(self, rows: Int64s) -> None:
        """Returns when all is copied."""
        with beside_captures(self._device):
            for target, source, nbytes in rows.tolist():
                self._stream.memcpy_async(target, source, nbytes)
            self._stream.synchronize()

    def close(self) -> None:
        """Idempotent."""
        with beside_captures(self._device):
            self._undo.close()


def _free(device: int, address: int) -> None:
    if load_driver() is not None:  # None in a forked child, whose parent still has it
        with beside_captures(device), bound(device) as drv:
            drv.mem_free(address)
