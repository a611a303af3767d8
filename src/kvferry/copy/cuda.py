"""Copies between paged GPU memory and pinned host memory, at the speed of the copy engine."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

from kvferry.copy.copier import Cancelled, check_cancelled
from kvferry.copy.kernel import CopyKernel
from kvferry.copy.plan import CopyPlan
from kvferry.copy.staging import StagingHalf
from kvferry.copy.steps import ALIGNMENT, cut_steps
from kvferry.cuda.device import bound

_MIN_STAGING_BYTES = 2 * ALIGNMENT
_MAX_STAGING_BYTES = 256 << 20


class CudaCopier:
    """Two halves of staging take turns: while the copy engine moves one, a small kernel fills or empties the other.

    The paged side are device addresses, mapped in this process; the flat side is pinned host memory, and chunks that
    touch lie in memory that was pinned at once. The kernel takes at most `max_ctas` blocks of 512 threads, so that an
    engine on the same GPU hardly notices it. For one thread at a time.

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
        self._undo = ExitStack()

    def gather(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side; ValueError where the plan skips a part of a chunk."""
        self._copy(plan.in_order(whole=True), cancelled, to_flat=True)

    def scatter(self, plan: CopyPlan, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side. Of a chunk of which a part is skipped all is read."""
        self._copy(plan.in_order(whole=False), cancelled, to_flat=False)

    def warm(self) -> None:
        """Compile the kernel and allocate the staging, if that is still to be done."""
        self._ready()

    def close(self) -> None:
        """Give the staging back; idempotent. A later copy makes it anew."""
        self._kernel, self._halves = None, ()
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

    def _copy(self, plan: CopyPlan, cancelled: Cancelled | None, *, to_flat: bool) -> None:
        if not len(plan.flats):
            return
        kernel = self._ready()
        steps = cut_steps(plan, buffer_bytes=self._half_bytes, growing=to_flat)
        with bound(self.device) as drv, ExitStack() as drained:
            for half in self._halves:
                drained.callback(half.drain, drv)
            kernel.load(drv, plan, stream=self._halves[0].stream)
            self._halves[1].follow(drv, self._halves[0])
            for index, step in enumerate(steps):
                check_cancelled(cancelled, step.begin)
                self._halves[index % 2].submit(drv, step, kernel, to_flat=to_flat)

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
            self._undo = undo.pop_all()
        self._kernel, self._halves = kernel, tuple(halves)
        return kernel
