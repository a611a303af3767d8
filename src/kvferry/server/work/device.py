"""What a worker needs of the device it works for, and the host's own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

from kvferry.copy import Copier, HostCopier
from kvferry.server.work.tasks import Direction

_POPULATE_BYTES = 8 << 20


class Device(Protocol):
    """One device's part of the work. Made, used and closed in the worker's thread.

    `step_bytes` is how much is copied at most for one cache before the next has its turn; `prepare_bytes` how much
    memory one call of `prepare` may take. Steps of the copiers of both directions take turns.
    """

    name: str
    step_bytes: int
    prepare_bytes: int
    copiers: Mapping[Direction, Copier]

    def prepare(self, address: int, nbytes: int) -> None:
        """Make host memory ready for fast copies."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether no call to the device can succeed any more after this error."""

    def close(self) -> None:
        """Give back what the device holds; idempotent."""


class HostDevice:
    """The host itself: engines whose KV cache is in shared host memory."""

    name = "cpu"
    step_bytes = 64 << 20
    prepare_bytes = _POPULATE_BYTES

    def __init__(self) -> None:
        copier = HostCopier()
        copier.warm()
        self.copiers: Mapping[Direction, Copier] = dict.fromkeys(Direction, copier)

    def prepare(self, address: int, nbytes: int) -> None:
        """Touch the memory, so that no copy has to wait for pages."""
        ctypes.memset(address, 0, nbytes)

    def is_fatal(self, error: Exception) -> bool:
        """Never: host memory fails one request at a time."""
        return False

    def close(self) -> None:
        for copier in self.copiers.values():
            copier.close()
