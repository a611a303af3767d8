"""What is to be copied: runs of bytes between paged blocks and flat chunks. Pure arithmetic, no memory is touched.

A flat chunk holds its blocks plane by plane: all blocks of the chunk of plane 0, then those of plane 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError
from kvferry.layout import KVLayout

Int64s: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = Sequence[int] | Int64s


class Runs(NamedTuple):
    """Byte runs, in the order of their flat addresses: `nbytes[i]` bytes at address `paged[i]` and at `flat[i]`."""

    paged: Int64s
    flat: Int64s
    nbytes: Int64s


def plan_runs(
    layout: KVLayout, bases: Integers, block_ids: Integers, flat_addresses: Integers, skip_blocks: int = 0
) -> Runs:
    """The runs of `len(flat_addresses)` chunks, whose blocks are `block_ids`, equally many a chunk.

    `bases` are the addresses of the storages, by number; `flat_addresses` those of the chunks. The first `skip_blocks`
    blocks are left out: their bytes are neither read nor written. Runs that touch on both sides are joined.

    Raises BlockIdError for ids outside the cache, used twice, or not the same number for each chunk.
    """
    ids = _checked_ids(layout.num_blocks, block_ids, len(flat_addresses), skip_blocks)
    planes = np.array([(p.storage, p.offset, p.stride, p.length) for p in layout.planes], dtype=np.int64)
    storages, offsets, strides, lengths = planes.T
    per_chunk = ids.shape[1]
    flats = np.asarray(flat_addresses, dtype=np.int64)
    order = np.argsort(flats, kind="stable")
    flats = flats[order]
    _check_apart(flats, per_chunk * int(lengths.sum()))
    starts = np.asarray(bases, dtype=np.int64)[storages] + offsets
    paged = ids[order][:, None, :] * strides[None, :, None] + starts[None, :, None]
    within = (per_chunk * (np.cumsum(lengths) - lengths))[:, None] + np.arange(per_chunk) * lengths[:, None]
    flat = flats[:, None, None] + within[None]
    nbytes = np.broadcast_to(lengths[None, :, None], paged.shape)
    if skip_blocks:
        position = order[:, None] * per_chunk + np.arange(per_chunk)
        kept = np.broadcast_to((position >= skip_blocks)[:, None, :], paged.shape)
        return _joined(paged[kept], flat[kept], nbytes[kept])
    return _joined(paged.ravel(), flat.ravel(), nbytes.ravel())


def split_runs(runs: Runs, limit: int) -> Runs:
    """The same runs, those of more than `limit` bytes cut into pieces of at most `limit`."""
    pieces = -(-runs.nbytes // limit)
    if not len(pieces) or int(pieces.max()) <= 1:
        return runs
    firsts = np.cumsum(pieces) - pieces
    within = (np.arange(int(pieces.sum())) - np.repeat(firsts, pieces)) * limit
    rest = np.repeat(runs.nbytes, pieces) - within
    return Runs(np.repeat(runs.paged, pieces) + within, np.repeat(runs.flat, pieces) + within, np.minimum(rest, limit))


def _checked_ids(num_blocks: int, block_ids: Integers, num_chunks: int, skip_blocks: int) -> Int64s:
    """`block_ids` as an array [num_chunks, blocks a chunk]."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.ndim != 1 or len(ids) % max(num_chunks, 1) or (len(ids) == 0) != (num_chunks == 0):
        raise BlockIdError(f"{ids.size} block ids for {num_chunks} chunks; each chunk needs the same number of blocks")
    if not 0 <= skip_blocks <= len(ids):
        raise BlockIdError(f"{skip_blocks} blocks to skip of {len(ids)}")
    used = ids[skip_blocks:]
    outside = used[(used < 0) | (used >= num_blocks)]
    if len(outside):
        raise BlockIdError(f"block id {outside[0]} is outside the cache, which has blocks 0 to {num_blocks - 1}")
    ordered = np.sort(used)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise BlockIdError(f"block id {twice[0]} is named twice; each block holds the KV of one place")
    return ids.reshape(num_chunks, -1) if num_chunks else ids.reshape(0, 0)


def _check_apart(flats: Int64s, chunk_bytes: int) -> None:
    near = np.flatnonzero(np.diff(flats) < chunk_bytes)
    if len(near):
        first, second = flats[near[0]], flats[near[0] + 1]
        raise ValueError(f"flat chunks at {first} and {second} overlap: a chunk has {chunk_bytes} bytes")


def _joined(paged: Int64s, flat: Int64s, nbytes: Int64s) -> Runs:
    if not len(flat):
        return Runs(paged, flat, nbytes.copy())
    touch = (paged[1:] == paged[:-1] + nbytes[:-1]) & (flat[1:] == flat[:-1] + nbytes[:-1])
    if not touch.any():
        return Runs(paged, flat, np.ascontiguousarray(nbytes))
    heads = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    return Runs(paged[heads], flat[heads], np.add.reduceat(nbytes, heads))
