"""Copies between paged GPU memory and pinned host memory, at the speed of the copy engine."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

from kvferry.copy.copier import Copier, Steps
from kvferry.copy.direct import MIN_RUN_BYTES, DirectCopies, mean_run_bytes
from kvferry.copy.kernel import CopyKernel
from kvferry.copy.plan import CopyPlan
from kvferry.copy.staging import StagingHalf
from kvferry.copy.steps import ALIGNMENT, cut_steps
from kvferry.cuda.device import bound

_MIN_STAGING_BYTES = 2 * ALIGNMENT
_MAX_STAGING_BYTES = 256 << 20


class CudaCopier(Copier):
    """Copies in one of two ways, each as fast as one big copy where it is used.

    Where at least `MIN_RUN_BYTES` lie side by side on both sides, the copy engine takes every block to its place. Else
    two halves of staging take turns: while the copy engine moves one, a small kernel fills or empties the other. The
    first way leaves an engine on the same GPU alone; the second, while that is busy, has to take turns with it and runs
    at half its speed. Drivers before CUDA 12.8 know only the second.

    The paged side are device addresses, mapped in this process; the flat side is pinned host memory, and chunks that
    touch lie in memory that was pinned at once. The kernel takes at most `max_ctas` blocks of 512 threads. For one
    thread at a time.

    What ran on the paged memory before in other streams has to be done before `gather` or `scatter` is called.
    """

    def __init__(self, device: int, staging_bytes: int = 64 << 20, *, max_ctas: int = 32) -> None:
        if not _MIN_STAGING_BYTES <= staging_bytes <= _MAX_STAGING_BYTES or max_ctas < 1:
            raise ValueError(
                f"staging of {staging_bytes} bytes and {max_ctas} CTAs; staging has {_MIN_STAGING_BYTES} to "
                f"{_MAX_STAGING_BYTES} bytes, and there is at least one CTA"
            )
        self.device = device
        self._half_bytes = staging_bytes // 2 // ALIGNMENT * ALIGNMENT
        self._max_ctas = max_ctas
        self._kernel: CopyKernel | None = None
        self._halves: tuple[StagingHalf, ...] = ()
        self._direct: DirectCopies | None = None
        self._undo = ExitStack()

    def warm(self) -> None:
        """Compile the kernel and allocate the staging, if that is still to be done."""
        self._ready()

    def close(self) -> None:
        """Give the staging back; idempotent. A later copy makes it anew."""
        self._kernel, self._halves, self._direct = None, (), None
        self._undo.close()

    def __enter__(self) -> CudaCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_halves", ()):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<CudaCopier on device {self.device}, {'ready' if self._halves else 'closed'}>"

    def _steps(self, plan: CopyPlan, *, to_flat: bool) -> Steps:
        kernel = self._ready()
        if self._direct is not None and mean_run_bytes(plan) >= MIN_RUN_BYTES:
            return self._direct.steps(plan, to_flat=to_flat)
        return self._staged_steps(plan, kernel, to_flat=to_flat)

    def _staged_steps(self, plan: CopyPlan, kernel: CopyKernel, *, to_flat: bool) -> Steps:
        if not len(plan.flats):
            return
        # The context is bound anew for each step: between two, the thread may do other work.
        with ExitStack() as drained:
            with bound(self.device) as drv:
                for half in self._halves:
                    drained.callback(self._drain, half)
                kernel.load(drv, plan, stream=self._halves[0].stream)
                self._halves[1].follow(drv, self._halves[0])
            for index, step in enumerate(cut_steps(plan, buffer_bytes=self._half_bytes, growing=to_flat)):
                yield step.begin
                with bound(self.device) as drv:
                    self._halves[index % 2].submit(drv, step, kernel, to_flat=to_flat)

    def _drain(self, half: StagingHalf) -> None:
        with bound(self.device) as drv:
            half.drain(drv)

    def _ready(self) -> CopyKernel:
        if self._kernel is not None:
            return self._kernel
        with ExitStack() as undo:
            kernel = CopyKernel(self.device, max_ctas=self._max_ctas)
            undo.callback(kernel.close)
            halves = []
            for _ in range(2):
                halves.append(StagingHalf(self.device, self._half_bytes))
                undo.callback(halves[-1].close)
            with bound(self.device) as drv:
                kernel.warm(drv, stream=halves[0].stream)
                halves[0].drain(drv)
                direct = DirectCopies(self.device) if drv.copies_batches else None
            if direct is not None:
                undo.callback(direct.close)
            self._undo = undo.pop_all()
        self._kernel, self._halves, self._direct = kernel, tuple(halves), direct
        return kernel
