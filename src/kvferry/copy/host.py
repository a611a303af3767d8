"""Copies within host memory."""

from __future__ import annotations

import ctypes

from kvferry.copy.copier import Copier, Steps
from kvferry.copy.plan import CopyPlan, Int64s
from kvferry.copy.streaming import StreamingCopy

_STEP_BYTES = 16 << 20
_STEP_ROWS = 1 << 18


class HostCopier(Copier):
    """Copies between host addresses, past the caches where the processor allows; other Python threads run meanwhile."""

    def __init__(self) -> None:
        streaming = StreamingCopy.load()
        self._copy_rows = _move if streaming is None else streaming.copy_rows

    def warm(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing that outlives the object."""

    def _steps(self, plan: CopyPlan, *, to_flat: bool) -> Steps:
        """Some whole chunks each."""
        chunks = plan.chunks
        a_step = max(1, min(_STEP_BYTES // chunks.chunk_bytes, _STEP_ROWS // (chunks.blocks * chunks.planes.shape[1])))
        for start in range(0, len(plan.flats), a_step):
            yield start * chunks.chunk_bytes
            self._copy_rows(plan.part(start, start + a_step).rows(to_flat=to_flat))


def _move(rows: Int64s) -> None:
    for target, source, nbytes in rows.tolist():
        ctypes.memmove(target, source, nbytes)
