"""The one process-wide object: who this process is, what it has mapped from others, what of its own it can share.

The CUDA driver keeps one mapping of an allocation per process, so the table that counts uses of it has to be as wide.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from typing import NamedTuple

from kvferry.ipc.descriptor import TOKEN_BYTES
from kvferry.ipc.mappings import MappingTable

_MAX_EXPORTS = 65_536


class SegmentTable:
    """Which address ranges of this process lie in host memory that can be shared; holds the segments weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: weakref.WeakValueDictionary[tuple[int, int], object] = weakref.WeakValueDictionary()

    def add(self, address: int, nbytes: int, segment: object) -> None:
        """Note that `segment` backs [address, address + nbytes)."""
        with self._lock:
            self._segments[(address, address + nbytes)] = segment

    def find(self, address: int, nbytes: int = 1) -> object | None:
        """The segment that holds all of [address, address + nbytes), or None."""
        with self._lock:
            for (start, end), segment in list(self._segments.items()):
                if start <= address and address + nbytes <= end:
                    return segment
        return None


class LocalExport(NamedTuple):
    """An allocation that this process has exported: what opening its handle here resolves to.

    `parts` are address and buffer id of each physical chunk, where there are several.
    """

    buffer_id: int
    address: int
    nbytes: int
    device: int
    parts: tuple[tuple[int, int], ...] = ()


def new_token() -> bytes:
    """Random bytes that name one thing, in all processes and for ever."""
    return secrets.token_bytes(TOKEN_BYTES)


class ProcessTable:
    """Who this process is (`token`), what it maps (`mappings`), and what of its own it can share or has shared.

    A forked child gets a new token and an empty table of mappings, with no driver call: the parent's mappings are not
    the child's. Host segments stay, since a fork inherits them.
    """

    def __init__(self) -> None:
        self.token = new_token()
        self.mappings = MappingTable()
        self.segments = SegmentTable()
        self.exports: dict[bytes, LocalExport] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork_in_child)
        atexit.register(self._at_exit)

    def add_export(self, handle: bytes, export: LocalExport) -> None:
        """Remember what `handle` stands for here; of very many the oldest are forgotten."""
        with self._lock:
            self.exports.pop(handle, None)
            self.exports[handle] = export
            if len(self.exports) > _MAX_EXPORTS:
                del self.exports[next(iter(self.exports))]

    def _at_exit(self) -> None:
        self.mappings.end()

    def _after_fork_in_child(self) -> None:
        self.token = new_token()
        self.mappings = MappingTable()
        self.exports = {}
        self._lock = threading.Lock()
        self.segments._lock = threading.Lock()


_TABLE = ProcessTable()


def process_table() -> ProcessTable:
    """The table of this process."""
    return _TABLE
