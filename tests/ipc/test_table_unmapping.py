"""Asking again and again whether something is unmapped does not keep it from being unmapped."""

from __future__ import annotations

import time

from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingTable

PROMPTLY_S = 0.5  # the unmapper looks by itself only after seconds


def test_who_asks_all_the_time_does_not_take_the_unmappers_notes() -> None:
    table = MappingTable()
    for round_number in range(20):
        key = MappingKey(b"e" * 16, round_number, b"h" * 64)
        table.acquire(key, lambda: Opened(0x1000, 4096, lambda: None)).release()
        started = time.monotonic()
        ended = table.unmapping()
        while not ended():
            assert time.monotonic() - started < PROMPTLY_S
    table.drain(timeout_s=10)
