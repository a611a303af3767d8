"""A GPU as a worker's device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from kvferry.copy import Copier
from kvferry.copy.cuda import CudaCopier
from kvferry.cuda.device import ordinal_of
from kvferry.cuda.memory import register_host, unregister_host
from kvferry.errors import CudaError, ShareError
from kvferry.server.limits import what_limits_pinning
from kvferry.server.work.tasks import Direction

_STAGING_BYTES = 32 << 20  # of each direction

# After these nothing works any more in this process: the driver is shut down (4), a fault of memory or NVLink (214,
# 220, 226), an illegal address (700), a launch that took too long (702), a destroyed context (709), an assertion (710),
# faults of a kernel (714 to 719, 721), a client that MPS has ended (810), and "unknown" (999).
_FATAL_CODES = frozenset({4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 999})


class CudaDevice:
    """The GPU with this UUID: engines whose KV cache is on it.

    Raises UnknownDeviceError where it is not visible here, CudaError where it cannot be used.
    """

    step_bytes = 1 << 30
    prepare_bytes = 1 << 40  # a piece is pinned at once

    def __init__(self, device_uuid: str) -> None:
        self._ordinal = ordinal_of(device_uuid)
        self._undo = ExitStack()
        self.name = device_uuid
        copiers = {direction: CudaCopier(self._ordinal, _STAGING_BYTES) for direction in Direction}
        try:
            for copier in copiers.values():
                self._undo.callback(copier.close)
                copier.warm()
        except CudaError:
            self.close()
            raise
        self.copiers: Mapping[Direction, Copier] = copiers

    def prepare(self, address: int, nbytes: int) -> None:
        """Pin the memory, for this and all other GPUs; about half a second a GiB.

        Raises ShareError where it cannot be pinned, with the limits that may be why. There is no going on without: it
        would be slow, and nobody would know.
        """
        try:
            register_host(address, nbytes, device=self._ordinal)
        except CudaError as error:
            raise ShareError(f"{nbytes} bytes of memory cannot be pinned: {error}; {what_limits_pinning()}") from error
        self._undo.callback(unregister_host, address, device=self._ordinal)

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device's context is lost."""
        return isinstance(error, CudaError) and error.code in _FATAL_CODES

    def close(self) -> None:
        """Unpin the memory and give the staging back; idempotent."""
        self._undo.close()
