"""Copies between paged GPU memory and pinned host memory, at the speed of the copy engine."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path

from kvferry.copy.copier import Cancelled, Work, batches_of, check_cancelled
from kvferry.copy.staging import MAX_PIECES, StagingHalf
from kvferry.copy.steps import cut_steps
from kvferry.cuda.device import bound
from kvferry.cuda.nvrtc import Function, Module, compile_ptx

_MAX_STAGING_BYTES = 256 << 20
_SOURCE = Path(__file__).with_name("copy_runs.cu")


class CudaCopier:
    """Two halves of staging take turns: while the copy engine moves one, a small kernel fills or empties the other.

    The paged side are device addresses, mapped in this process; the flat side is pinned host memory. The kernel takes
    at most `max_ctas` blocks of 512 threads, so that an engine on the same GPU hardly notices it. For one thread at a
    time.

    What ran on the paged memory before in other streams has to be done before `gather` or `scatter` is called.
    """

    def __init__(self, device: int, staging_bytes: int = 64 << 20, *, max_ctas: int = 32) -> None:
        if not 2 <= staging_bytes <= _MAX_STAGING_BYTES or max_ctas < 1:
            raise ValueError(
                f"staging of {staging_bytes} bytes and {max_ctas} CTAs; staging has 2 to {_MAX_STAGING_BYTES} bytes, "
                "and there is at least one CTA"
            )
        self.device = device
        self._half_bytes = staging_bytes // 2
        self._max_ctas = max_ctas
        self._kernel: Function | None = None
        self._halves: tuple[StagingHalf, ...] = ()
        self._undo = ExitStack()

    def gather(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the paged side to the flat side."""
        self._copy(runs, cancelled, gather=True)

    def scatter(self, runs: Work, cancelled: Cancelled | None = None) -> None:
        """Copy from the flat side to the paged side."""
        self._copy(runs, cancelled, gather=False)

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

    def _copy(self, runs: Work, cancelled: Cancelled | None, *, gather: bool) -> None:
        kernel = self._ready()
        steps = cut_steps(batches_of(runs), buffer_bytes=self._half_bytes, max_pieces=MAX_PIECES, growing=gather)
        done = 0
        with bound(self.device) as drv, ExitStack() as drained:
            for half in self._halves:
                drained.callback(half.drain)
            for index, step in enumerate(steps):
                check_cancelled(cancelled, done)
                half = self._halves[index % 2]
                if gather:
                    half.gather(drv, step, kernel)
                else:
                    half.scatter(drv, step, kernel)
                done += int(step.pieces.nbytes.sum())

    def _ready(self) -> Function:
        if self._kernel is not None:
            return self._kernel
        with ExitStack() as undo:
            module = undo.enter_context(Module(compile_ptx(_SOURCE.read_text(), self.device), self.device))
            halves = []
            for _ in range(2):
                halves.append(StagingHalf(self.device, self._half_bytes, max_ctas=self._max_ctas))
                undo.callback(halves[-1].close)
            kernel = module.function("copy_runs")
            with bound(self.device) as drv:
                for half in halves:
                    half.warm(drv, kernel)
            self._undo = undo.pop_all()
        self._kernel, self._halves = kernel, tuple(halves)
        return kernel
