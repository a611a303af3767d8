"""What is to be copied from the blocks of one paged cache to those of another. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.copy.plan import Int32s
from kvferry.copy.strips import Int64s, cut_strips


class BlockPairs(NamedTuple):
    """Block `from_ids[i]` of the source becomes block `to_ids[i]`.

    `pieces` has a column for each run of bytes that a block has: its address in block 0 and its stride on the side that
    is written, the same two on the side that is read, and its bytes.
    """

    pieces: Int64s
    to_ids: Int32s
    from_ids: Int32s

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.pieces[4].sum())

    def part(self, start: int, stop: int) -> BlockPairs:
        """The copy of blocks number `start` to `stop` of the list alone."""
        return self._replace(to_ids=self.to_ids[start:stop], from_ids=self.from_ids[start:stop])

    def mostly_ascend(self) -> bool:
        """Whether most blocks lie behind the one before, on both sides: cheaper to tell than `columns`."""
        steps = (np.diff(self.to_ids) == 1) & (np.diff(self.from_ids) == 1)
        return bool(2 * np.count_nonzero(steps) > len(steps))

    def columns(self) -> Int64s:
        """The copy as columns (target, source, bytes); what lies side by side in a piece on both sides is one.

        Pieces are kept apart: what lies side by side there may be two allocations.
        """
        to, to_stride, source, from_stride, nbytes = self.pieces[:, :, None]
        columns: Int64s = np.empty((3, self.pieces.shape[1], len(self.to_ids)), dtype=np.int64)
        columns[0] = to + to_stride * self.to_ids
        columns[1] = source + from_stride * self.from_ids
        columns[2] = nbytes
        is_head = np.ones(columns.shape[1:], dtype=bool)
        ends = columns[:2, :, :-1] + columns[2, :, :-1]
        is_head[:, 1:] = (ends != columns[:2, :, 1:]).any(axis=0)
        heads = np.flatnonzero(is_head)
        columns = columns.reshape(3, -1)
        merged = np.ascontiguousarray(columns[:, heads])
        merged[2] = np.add.reduceat(columns[2], heads)
        return merged

    def strips(self) -> Int64s:
        """The pieces cut into strips, as rows of struct Pair."""
        to, to_stride, source, from_stride, nbytes = self.pieces
        piece, within, left = cut_strips(nbytes)
        rows = (to[piece] + within, to_stride[piece], source[piece] + within, from_stride[piece], left)
        return np.stack(rows, axis=1)
