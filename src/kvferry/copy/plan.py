"""What is to be copied between paged blocks and flat chunks. Pure arithmetic, no memory is touched.

A flat chunk holds its blocks plane by plane: all blocks of the chunk of plane 0, then those of plane 1, and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.copy.strips import Int64s, cut_strips
from kvferry.errors import BlockIdError
from kvferry.layout import KVLayout

Int32s: TypeAlias = npt.NDArray[np.int32]
Integers: TypeAlias = Sequence[int] | Int64s | Int32s


class ChunkMap:
    """Where the bytes of chunks of `blocks` blocks each lie: worked out once for all copies of a cache.

    `bases` are the addresses of the layout's storages, by number. `planes` has four rows: the address of block 0, the
    stride and the length of each plane, and its place in a flat chunk.
    """

    def __init__(self, layout: KVLayout, bases: Sequence[int], blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"chunks of {blocks} blocks; a chunk has at least one")
        rows = [(bases[plane.storage] + plane.offset, plane.stride, plane.length) for plane in layout.planes]
        self._set(np.array(rows, dtype=np.int64).T, layout.num_blocks, blocks)

    @classmethod
    def of_planes(cls, planes: Int64s, *, num_blocks: int, blocks: int) -> ChunkMap:
        """The same for planes given as the first three rows of `planes`."""
        made = cls.__new__(cls)
        made._set(planes, num_blocks, blocks)
        return made

    def _set(self, planes: Int64s, num_blocks: int, blocks: int) -> None:
        starts, strides, lengths = planes
        self.planes: Int64s = np.stack((starts, strides, lengths, blocks * (np.cumsum(lengths) - lengths)))
        self.num_blocks = num_blocks
        self.blocks = blocks
        self.chunk_bytes = blocks * int(lengths.sum())

    @functools.cached_property
    def strips(self) -> Int64s:
        """The planes in strips of at most `STRIP_BYTES`, as rows of struct Strip."""
        starts, strides, lengths, places = self.planes
        plane, within, nbytes = cut_strips(lengths)
        rows = (starts[plane] + within, strides[plane], nbytes, places[plane] + within, lengths[plane])
        return np.stack(rows, axis=1)

    def plan(self, block_ids: Integers, flat_addresses: Integers, skip_blocks: int = 0) -> CopyPlan:
        """The copy of whole chunks at `flat_addresses`, whose blocks are `block_ids`, but for the first `skip_blocks`.

        Raises BlockIdError for ids outside the cache, used twice, or too few or many for the chunks; those of skipped
        blocks may be anything.
        """
        flats = np.asarray(flat_addresses, dtype=np.int64)
        ids = np.array(block_ids, dtype=np.int64)
        if ids.ndim != 1 or len(ids) != len(flats) * self.blocks:
            raise BlockIdError(f"{ids.size} block ids for {len(flats)} chunks of {self.blocks} blocks")
        if not 0 <= skip_blocks <= len(ids):
            raise BlockIdError(f"{skip_blocks} blocks to skip of {len(ids)}")
        check_ids(ids[skip_blocks:], self.num_blocks)
        ids[:skip_blocks] = -1
        return CopyPlan(self, ids.astype(np.int32).reshape(len(flats), self.blocks), flats, skip_blocks > 0)


class CopyPlan(NamedTuple):
    """A checked copy: the chunk at address `flats[i]` has the blocks `ids[i]`.

    Where it `skips` blocks, -1 stands for those that are left as they are.
    """

    chunks: ChunkMap
    ids: Int32s
    flats: Int64s
    skips: bool

    def part(self, start: int, stop: int) -> CopyPlan:
        """The copy of chunks `start` to `stop` alone."""
        return self._replace(ids=self.ids[start:stop], flats=self.flats[start:stop])

    def stage(self, number: int, of: int) -> CopyPlan:
        """One of `of` copies that together are this one: of all chunks the planes that are stage `number`'s share.

        Of P planes these are `number * P // of` up to `(number + 1) * P // of`. Raises ValueError where there is no
        such stage, or a stage would have no plane.
        """
        planes = self.chunks.planes
        count = planes.shape[1]
        if not 0 <= number < of <= count:
            raise ValueError(f"stage {number} of {of}, for {count} planes; each stage has at least one")
        first, stop = number * count // of, (number + 1) * count // of
        chunks = ChunkMap.of_planes(
            planes[:3, first:stop], num_blocks=self.chunks.num_blocks, blocks=self.chunks.blocks
        )
        return self._replace(chunks=chunks, flats=self.flats + planes[3, first])

    def in_order(self, *, whole: bool) -> CopyPlan:
        """The same copy in the order of flat addresses, without chunks of which nothing is copied.

        Raises ValueError where chunks overlap, or where they are to be `whole` and a part of one is left out.
        """
        order = np.argsort(self.flats)
        if self.skips:
            # Blocks are skipped from the front, so a chunk whose last one is skipped is skipped entirely.
            order = order[self.ids[order, -1] >= 0]
        ids, flats = self.ids[order], self.flats[order]
        if whole and self.skips and (ids < 0).any():
            raise ValueError("blocks can be skipped only where they are written: a flat chunk is filled as a whole")
        near = flats[1:] - flats[:-1] < self.chunks.chunk_bytes
        if near.any():
            first, second = flats[int(near.argmax()) :][:2]
            raise ValueError(f"chunks at {first} and {second} overlap: each has {self.chunks.chunk_bytes} bytes")
        return self._replace(ids=ids, flats=flats)

    def rows(self, *, to_flat: bool) -> Int64s:
        """The copy as rows (target, source, bytes), one for each block of each plane; 0 bytes where it is skipped."""
        starts, strides, lengths, places = self.chunks.planes[:, :, None]
        ids = self.ids[:, None, :]
        rows = np.empty((len(ids), len(starts), self.chunks.blocks, 3), dtype=np.int64)
        flat, paged = (0, 1) if to_flat else (1, 0)
        np.multiply(ids, strides, out=rows[..., paged])
        rows[..., paged] += starts
        rows[..., flat] = self.flats[:, None, None] + (places + np.arange(self.chunks.blocks) * lengths)
        rows[..., 2] = lengths * (ids >= 0)
        return rows.reshape(-1, 3)


def check_ids(ids: Int64s, num_blocks: int) -> None:
    """Raise BlockIdError for ids outside a cache of so many blocks, or used twice."""
    ordered = np.sort(ids)
    if len(ids) and (ordered[0] < 0 or ordered[-1] >= num_blocks):
        wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
        raise BlockIdError(f"block id {wrong} is outside the cache, which has blocks 0 to {num_blocks - 1}")
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        wrong = ordered[int(twice.argmax())]
        raise BlockIdError(f"block id {wrong} is named twice; each block holds the KV of one place")
