"""Checksums of chunks in memory: a changed bit is found before it reaches an engine."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kvferry.copy import ChunkMap, CopyPlan
from kvferry.layout import KVLayout, Plane
from kvferry.server.work.checksums import count_good, digests_of

BLOCK = 64
LAYOUT = KVLayout(
    format="f", block_size=16, num_blocks=12, dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1,
    planes=(Plane(0, 0, BLOCK, BLOCK),),
)  # fmt: skip


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(3 * 4 * BLOCK, dtype=torch.int64).to(torch.uint8)


def plan_of(memory: torch.Tensor, skip_blocks: int = 0) -> CopyPlan:
    """Three chunks of four blocks, one behind the other."""
    addresses = memory.data_ptr() + np.arange(3) * 4 * BLOCK
    return ChunkMap(LAYOUT, [0], 4).plan(list(range(12)), addresses, skip_blocks)


def flip(memory: torch.Tensor, place: int) -> None:
    ctypes.c_ubyte.from_address(memory.data_ptr() + place).value ^= 1


@pytest.mark.parametrize("place", [0, 4 * BLOCK - 1, 4 * BLOCK, 12 * BLOCK - 1])
def test_a_bit_that_changed_is_found_wherever_it_is(memory: torch.Tensor, place: int) -> None:
    plan = plan_of(memory)
    digests = digests_of(plan)
    assert count_good(plan, digests) == 3
    flip(memory, place)
    assert count_good(plan, digests) == place // (4 * BLOCK)
    flip(memory, place)
    assert count_good(plan, digests) == 3


def test_a_chunk_without_a_checksum_or_without_use_is_not_looked_at(memory: torch.Tensor) -> None:
    digests = digests_of(plan_of(memory))
    flip(memory, 5)
    assert count_good(plan_of(memory), [b"", *digests[1:]]) == 3
    assert count_good(plan_of(memory, skip_blocks=4), digests) == 3
    assert count_good(plan_of(memory, skip_blocks=3), digests) == 0
