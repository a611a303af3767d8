"""Slots of an engine without a GPU, whose peer has one."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.copy.streaming import row_copier
from kvferry.p2p.carriers.pushes.ring import Ring, Wait
from kvferry.p2p.carriers.pushes.run import Part, Run


class HostRing(Ring):
    """In ordinary memory; copies within the host."""

    def __init__(self, *, slots: int, slot_bytes: int) -> None:
        self._memory = torch.empty(slots * slot_bytes, dtype=torch.uint8)
        self._copy_rows = row_copier()
        base = self._memory.data_ptr()
        super().__init__(tuple(base + slot * slot_bytes for slot in range(slots)), slot_bytes)

    def prepare(self, run: Run) -> None:
        """Where its bytes lie."""
        _ = run.byte_runs  # kept from then on

    def _copy(self, part: Part, slot: int, *, to_flat: bool) -> Wait:
        rows = part.run.byte_runs.part(part.begin, part.end).rows_from(slot)
        self._copy_rows(np.ascontiguousarray(rows[:, [1, 0, 2]]) if to_flat else rows)
        return lambda: None

    def _free(self) -> None:
        """The memory goes with the ring."""
