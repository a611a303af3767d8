"""Copies between a GPU's memory and slots that it reads and writes, in a stream of their own."""

from __future__ import annotations

from contextlib import ExitStack

from kvferry.copy.kernel import CopyKernel
from kvferry.copy.plan import CopyPlan
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.stream import Stream
from kvferry.p2p.carriers.pushes.run import Part, Run
from kvferry.p2p.memory import BlockMemory

_MAX_CTAS = 64  # of gather and scatter: half of an H200, so that NCCL's own blocks find their place beside them
# Enough for every run: to allocate another waits for what runs on the GPU, which may itself wait for a peer.
_TABLE_BYTES = 4 << 20


def plan_of(run: Run) -> CopyPlan | None:
    """What the kernel is to copy; None of flat memory, which the driver copies."""
    return run.plan if isinstance(run.memory, BlockMemory) else None


def prepare(run: Run) -> None:
    """Work out what `start` will need of a run. In any thread."""
    plan = plan_of(run)
    if plan is not None:
        _ = plan.chunks.strips  # kept from then on


class GpuCopies:
    """Blocks are copied by a kernel, flat memory, of whatever kind, by the driver. For one thread at a time.

    `offset` is how far from its address the GPU sees a slot.
    """

    def __init__(self, device: int, *, offset: int = 0) -> None:
        """Raises CudaError."""
        self.device = device
        self._offset = offset
        self._loaded: object = None
        with ExitStack() as undo:
            self._kernel = CopyKernel(device, max_ctas=_MAX_CTAS, table_bytes=_TABLE_BYTES)
            undo.callback(self._kernel.close)
            # Of another priority than NCCL's: a copy has no reason to stand behind a transfer that waits for a peer.
            self.stream = undo.enter_context(Stream(device, priority=-1))
            self._undo = undo.pop_all()

    def start(self, part: Part, slot: int, *, to_flat: bool) -> None:
        """Put the copy of a part into the stream. Raises CudaError."""
        stream = self.stream.handle
        with bound(self.device) as drv:
            plan = plan_of(part.run)
            if plan is not None:
                if self._loaded is not plan:
                    self._loaded = None
                    self._kernel.load(drv, plan, stream=stream)
                    self._loaded = plan
                step = Step(part.begin, part.end, [])
                self._kernel.launch(step, staging=slot + self._offset, stream=stream, to_flat=to_flat)
                return
            for address, distance, nbytes in part.ranges():
                target, source = (slot + distance, address) if to_flat else (address, slot + distance)
                drv.memcpy_async(target, source, nbytes, stream)

    def close(self) -> None:
        """Give everything back, once all copies are done. Idempotent."""
        self._loaded = None
        self._undo.close()
