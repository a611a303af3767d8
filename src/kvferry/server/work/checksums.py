"""Checksums of chunks in the server's memory, taken and checked by whoever copies them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvferry.cache.tiers.format import digest_of
from kvferry.copy import CopyPlan


def digests_of(plan: CopyPlan) -> list[bytes]:
    """The checksum of each flat chunk of a plan."""
    return [_digest_at(address, plan.chunks.chunk_bytes) for address in plan.flats.tolist()]


def count_good(plan: CopyPlan, digests: Sequence[bytes]) -> int:
    """How many chunks, from the first on, have their checksums. One of which nothing is copied is not looked at."""
    for number, (address, digest) in enumerate(zip(plan.flats.tolist(), digests, strict=True)):
        is_used = not plan.skips or plan.ids[number, -1] >= 0  # blocks are skipped from the front
        if digest and is_used and _digest_at(address, plan.chunks.chunk_bytes) != digest:
            return number
    return len(digests)


def _digest_at(address: int, nbytes: int) -> bytes:
    return digest_of(memoryview((ctypes.c_ubyte * nbytes).from_address(address)))
