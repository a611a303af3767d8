"""The records of the table of mappings: what names a mapping, what an opener gives, what the table says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class MappingKey(NamedTuple):
    """Which allocation of which process: the exporter's token, the driver's id of the allocation, the handle."""

    exporter: bytes
    buffer_id: int
    handle: bytes


class Opened(NamedTuple):
    """What an opener made: where the memory is mapped, how much of it, and how to undo that (called once)."""

    address: int
    nbytes: int
    close: Callable[[], None]


class MappingStats(NamedTuple):
    """A snapshot of the table; `opens`, `closes` and `close_failures` count since the process began."""

    mapped: int
    references: int
    mapped_bytes: int
    opens: int
    closes: int
    close_failures: int
