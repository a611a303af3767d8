"""The slow twin of the planner and the copiers: one byte range after another, from the definition. For tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.layout import KVLayout

Bytes = npt.NDArray[np.uint8]


def gather(layout: KVLayout, storages: Sequence[Bytes], block_ids: Sequence[int], *, num_chunks: int) -> list[Bytes]:
    """The flat chunks that hold `block_ids` of `storages` (flat bytes, by storage number)."""
    return [
        np.concatenate([storages[plane.storage][_place(plane, block)] for plane in layout.planes for block in blocks])
        for blocks in _by_chunk(block_ids, num_chunks)
    ]


def scatter(
    layout: KVLayout,
    storages: Sequence[Bytes],
    block_ids: Sequence[int],
    chunks: Sequence[Bytes],
    skip_blocks: int = 0,
) -> None:
    """Write flat `chunks` into `storages`, but for the first `skip_blocks` of `block_ids`."""
    position = 0
    for blocks, chunk in zip(_by_chunk(block_ids, len(chunks)), chunks, strict=True):
        at = 0
        for plane in layout.planes:
            for index, block in enumerate(blocks):
                if position + index >= skip_blocks:
                    storages[plane.storage][_place(plane, block)] = chunk[at : at + plane.length]
                at += plane.length
        position += len(blocks)


def _by_chunk(block_ids: Sequence[int], num_chunks: int) -> list[list[int]]:
    size = len(block_ids) // num_chunks
    return [list(block_ids[start : start + size]) for start in range(0, len(block_ids), size)]


def _place(plane: Any, block: int) -> slice:
    start = plane.offset + block * plane.stride
    return slice(start, start + plane.length)
