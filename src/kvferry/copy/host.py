"""Copies within host memory."""

from __future__ import annotations

from kvferry.copy.copier import Copier, Steps
from kvferry.copy.plan import CopyPlan
from kvferry.copy.streaming import row_copier

_STEP_BYTES = 16 << 20
_STEP_ROWS = 1 << 18


class HostCopier(Copier):
    """Copies between host addresses, past the caches where the processor allows; other Python threads run meanwhile."""

    def __init__(self) -> None:
        self._copy_rows = row_copier()

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
