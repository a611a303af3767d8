"""What is to be copied: runs of bytes between paged blocks and flat chunks. Pure arithmetic, no memory is touched.

A flat chunk holds its blocks plane by plane: all blocks of the chunk of plane 0, then those of plane 1, and so on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError
from kvferry.layout import KVLayout

Int64s: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = Sequence[int] | Int64s
_BATCH_BYTES = 64 << 20


class Runs(NamedTuple):
    """Byte runs, in the order of their flat addresses: `nbytes[i]` bytes at address `paged[i]` and at `flat[i]`.

    Run `i` belongs to the flat chunk number `chunk[i]`. No run reaches into another chunk, nor may a copy of several
    runs at once: neighbouring chunks can lie in memory that was pinned in separate pieces.
    """

    paged: Int64s
    flat: Int64s
    nbytes: Int64s
    chunk: Int64s


def plan_runs(
    layout: KVLayout, bases: Integers, block_ids: Integers, flat_addresses: Integers, skip_blocks: int = 0
) -> Runs:
    """The runs of `len(flat_addresses)` chunks, whose blocks are `block_ids`, equally many a chunk.

    `bases` are the addresses of the storages, by number; `flat_addresses` those of the chunks. The first `skip_blocks`
    blocks are left out: their bytes are neither read nor written. Runs of a chunk that touch on both sides are joined.

    Raises BlockIdError for ids outside the cache, used twice, or not the same number for each chunk.
    """
    plan = _Plan.of(layout, bases, block_ids, flat_addresses, skip_blocks)
    return plan.runs(0, len(plan.flats))


def plan_batches(
    layout: KVLayout, bases: Integers, block_ids: Integers, flat_addresses: Integers, skip_blocks: int = 0
) -> Iterator[Runs]:
    """The same as `plan_runs` in batches of about 64 MiB, each worked out when it is asked for.

    So a copier that is given them begins at once, and plans while it copies. What is refused is refused at the call.
    """
    plan = _Plan.of(layout, bases, block_ids, flat_addresses, skip_blocks)
    step = max(1, _BATCH_BYTES // max(1, plan.chunk_bytes))
    # The first batch is one chunk, so that the copy begins at once.
    bounds = [0, *range(1, len(plan.flats), step), len(plan.flats)]
    return (plan.runs(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop)


class _Plan(NamedTuple):
    """A checked request, its chunks in the order of their flat addresses."""

    planes: Int64s  # [4, planes]: address of block 0, stride, length, place in a flat chunk
    ids: Int64s  # [chunks, blocks a chunk]
    kept: npt.NDArray[np.bool_] | None  # the same shape, where some blocks are skipped
    flats: Int64s  # [chunks]

    @classmethod
    def of(
        cls, layout: KVLayout, bases: Integers, block_ids: Integers, flat_addresses: Integers, skip_blocks: int
    ) -> _Plan:
        flats = np.asarray(flat_addresses, dtype=np.int64)
        ids = _checked_ids(layout.num_blocks, block_ids, len(flats), skip_blocks)
        storages, offsets, strides, lengths = _columns(layout)
        places = ids.shape[1] * (np.cumsum(lengths) - lengths)
        planes = np.stack((np.asarray(bases, dtype=np.int64)[storages] + offsets, strides, lengths, places))
        order = np.argsort(flats, kind="stable")
        kept = (np.arange(ids.size) >= skip_blocks).reshape(ids.shape)[order] if skip_blocks else None
        plan = cls(planes, ids[order], kept, flats[order])
        _check_apart(plan.flats, plan.chunk_bytes)
        return plan

    @property
    def chunk_bytes(self) -> int:
        per_chunk: int = self.ids.shape[1]
        return per_chunk * int(self.planes[2].sum())

    def runs(self, start: int, stop: int) -> Runs:
        """Those of the chunks `start` to `stop`."""
        addresses, strides, lengths, places = self.planes
        ids, flats = self.ids[start:stop], self.flats[start:stop]
        # As [chunks, blocks, planes] first, so that the long axis is the inner one; then to [chunks, planes, blocks].
        paged = (ids[:, :, None] * strides + addresses).transpose(0, 2, 1)
        flat = flats[:, None, None] + (places[:, None] + np.arange(ids.shape[1]) * lengths[:, None])
        nbytes = np.broadcast_to(lengths[:, None], paged.shape)
        chunk = np.broadcast_to(np.arange(start, start + len(flats))[:, None, None], paged.shape)
        columns = (paged, flat, nbytes, chunk)
        if self.kept is None:
            return _joined(Runs(*(column.ravel() for column in columns)))
        kept = np.broadcast_to(self.kept[start:stop, None, :], paged.shape)
        return _joined(Runs(*(column[kept] for column in columns)))


def split_runs(runs: Runs, limit: int) -> Runs:
    """The same runs, those of more than `limit` bytes cut into pieces of at most `limit`."""
    if not len(runs.nbytes) or int(runs.nbytes.max()) <= limit:
        return runs
    pieces = -(-runs.nbytes // limit)
    ends = np.cumsum(pieces)
    origin = np.repeat(np.arange(len(pieces)), pieces)
    within = (np.arange(int(ends[-1])) - (ends - pieces)[origin]) * limit
    return Runs(
        paged=runs.paged[origin] + within,
        flat=runs.flat[origin] + within,
        nbytes=np.minimum(runs.nbytes[origin] - within, limit),
        chunk=runs.chunk[origin],
    )


@functools.lru_cache(maxsize=64)
def _columns(layout: KVLayout) -> Int64s:
    """Storages, offsets, strides and lengths of the planes; kept, since every copy asks for them."""
    rows = [(plane.storage, plane.offset, plane.stride, plane.length) for plane in layout.planes]
    columns = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
    columns.setflags(write=False)
    return columns


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
    near = flats[1:] - flats[:-1] < chunk_bytes
    if near.any():
        first, second = flats[int(near.argmax()) :][:2]
        raise ValueError(f"flat chunks at {first} and {second} overlap: a chunk has {chunk_bytes} bytes")


def _joined(runs: Runs) -> Runs:
    paged, flat, nbytes, chunk = runs
    touch = (paged[1:] == paged[:-1] + nbytes[:-1]) & (flat[1:] == flat[:-1] + nbytes[:-1])
    if not touch.any():
        return runs
    touch &= chunk[1:] == chunk[:-1]
    first = np.append(True, ~touch)
    last = np.append(~touch, True)
    starts = flat[first]
    return Runs(paged[first], starts, flat[last] + nbytes[last] - starts, chunk[first])
