"""The kernel `copy_chunks` on one device, and what it reads: where the planes lie, and the blocks of the copy."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np

from kvferry.copy.plan import ChunkMap, CopyPlan
from kvferry.copy.steps import Step
from kvferry.copy.strips import STRIP_BYTES, Int64s
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.nvrtc import Module, compile_ptx

SOURCE = Path(__file__).with_name("copy_chunks.cu")
THREADS = 512
WARPS = THREADS // 32
_FIRST_TABLE_BYTES = 256 << 10


class CopyKernel:
    """Loaded with one plan at a time: `load`, any number of `launch`, and all of them done before the next `load`.

    Methods that take the driver want the device's context to be current.
    """

    def __init__(self, device: int, *, max_ctas: int, table_bytes: int = _FIRST_TABLE_BYTES) -> None:
        """`table_bytes` is what is allocated for a plan at first. Raises CudaError."""
        self.device = device
        self._max_ctas = max_ctas
        self._plan: CopyPlan | None = None
        self._strips: Int64s = np.zeros((1, 5), dtype=np.int64)
        self._table = 0
        self._table_bytes = 0
        with ExitStack() as undo:
            module = undo.enter_context(Module(compile_ptx(SOURCE.read_text(), device), device))
            self._function = module.function("copy_chunks")
            with bound(device) as drv:
                self._reserve(drv, table_bytes)
            undo.callback(self._free_table)
            self._undo = undo.pop_all()

    def warm(self, drv: Driver, *, stream: int) -> None:
        """Put what a copy needs and a launch that copies nothing into the stream, before the first `load`."""
        drv.memcpy_h2d_async(self._table, self._strips.ctypes.data, self._strips.nbytes, stream)
        self._start((self._table, 1, self._table, 1, 1, 0, 0, 0), items=1, stream=stream, to_flat=True)

    def load(self, drv: Driver, plan: CopyPlan, *, stream: int) -> None:
        """Put what the kernel needs for the plan into the stream. The planes stay there for the next plan."""
        if self._plan is None or plan.chunks is not self._plan.chunks:
            self._plan = None
            self._strips = plan.chunks.strips
        nbytes = self._strips.nbytes + plan.ids.nbytes
        if nbytes > self._table_bytes:
            self._plan = None
            self._reserve(drv, nbytes)
        # From pageable memory: the driver takes it before it returns.
        if self._plan is None:
            drv.memcpy_h2d_async(self._table, self._strips.ctypes.data, self._strips.nbytes, stream)
        drv.memcpy_h2d_async(self._table + self._strips.nbytes, plan.ids.ctypes.data, plan.ids.nbytes, stream)
        self._plan = plan

    def launch(self, step: Step, *, staging: int, stream: int, to_flat: bool) -> None:
        """Put one step of the loaded plan into the stream; its bytes lie at address `staging`."""
        assert self._plan is not None
        chunks = self._plan.chunks
        touched = -(-step.end // chunks.chunk_bytes) - step.begin // chunks.chunk_bytes
        first, stop = 0, len(self._strips)
        if len(self._plan.ids) == 1:  # of a long chunk the kernel looks at what is copied alone
            first, stop = _strips_within(chunks, step)
        table = self._table + first * self._strips.strides[0]
        ids = self._table + self._strips.nbytes
        numbers = (table, stop - first, ids, chunks.blocks, chunks.chunk_bytes, step.begin, step.end, staging)
        self._start(numbers, items=touched * chunks.blocks * (stop - first), stream=stream, to_flat=to_flat)

    def close(self) -> None:
        """Give everything back, once all launches are done; idempotent."""
        self._undo.close()

    def _start(self, numbers: tuple[int, ...], *, items: int, stream: int, to_flat: bool) -> None:
        """Launch with those arguments before the last."""
        grid = (min(self._max_ctas, -(-items // WARPS)), 1, 1)
        args = [*map(c_uint64, numbers), c_uint32(to_flat)]
        self._function.launch(grid, (THREADS, 1, 1), stream=stream, args=args)

    def _reserve(self, drv: Driver, nbytes: int) -> None:
        """A table of at least that many bytes; what it held is gone."""
        size = 1 << (nbytes - 1).bit_length()
        old, self._table, self._table_bytes = self._table, 0, 0
        if old:
            drv.mem_free(old)
        self._table = drv.mem_alloc(size)
        self._table_bytes = size

    def _free_table(self) -> None:
        if self._table:
            with bound(self.device) as drv:
                drv.mem_free(self._table)


def _strips_within(chunks: ChunkMap, step: Step) -> tuple[int, int]:
    """The first strip of the planes that a step of the only chunk touches, and the one behind the last."""
    _, _, lengths, places = chunks.planes
    first = int(np.searchsorted(places, step.begin, side="right")) - 1
    stop = int(np.searchsorted(places, step.end))
    counts = -(-lengths[:stop] // STRIP_BYTES)
    return int(counts[:first].sum()), int(counts.sum())
