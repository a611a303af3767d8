"""Copies from the blocks of one paged cache straight to those of another, step by step."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import c_uint64
from functools import partial

import numpy as np

from kvferry.copy.direct import BATCH_ROWS, MIN_RUN_BYTES, copy_batch
from kvferry.copy.kernel import SOURCE, THREADS, WARPS
from kvferry.copy.pairs import BlockPairs
from kvferry.copy.streaming import row_copier
from kvferry.copy.strips import Int64s
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.nvrtc import Module, compile_ptx
from kvferry.cuda.stream import Event, Stream, beside_captures
from kvferry.errors import CudaError

_FIRST_TABLE_BYTES = 64 << 10
_LONG_RUN_BYTES = 2 << 20  # over NVLink the copy engine loses 5 % of its time with runs of 1 MiB, none with 16 MiB

IsDone = Callable[[], bool]


class PairCopier(ABC):
    """For one thread at a time. At most `depth` steps are under way, each of at most about `step_bytes` bytes."""

    step_bytes: int
    depth: int

    @abstractmethod
    def submit(self, pairs: BlockPairs, *, same_gpu: bool = False) -> IsDone:
        """Start one step; the answer says whether it is done, and never blocks.

        `same_gpu` says that the source lies on the GPU that copies: in another process, which uses it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the copier holds, once nothing is under way; idempotent."""


class HostPairCopier(PairCopier):
    """Between host addresses, past the caches where the processor allows. A step is done when `submit` returns."""

    step_bytes = 16 << 20
    depth = 1

    def __init__(self) -> None:
        self._copy_rows = row_copier()

    def submit(self, pairs: BlockPairs, *, same_gpu: bool = False) -> IsDone:
        """Copies at once, with the GIL released."""
        self._copy_rows(np.ascontiguousarray(pairs.columns().T))
        return lambda: True

    def close(self) -> None:
        """Nothing that outlives the object."""


class CudaPairCopier(PairCopier):
    """Into memory of one GPU, from its own or a peer's that is mapped here and that it may access.

    A kernel of at most `max_ctas` blocks of 512 threads copies; it runs on the GPU that is written. Where the source
    lies on the same GPU the copy engine does it, if it can: a kernel would have to take turns with those of the other
    process. So it does where blocks lie side by side in long runs: it has the full rate of the link, the kernel 94 %.
    One stream; what ran before on the memory in other streams has to be done before `submit`. CUDA graphs that other
    threads capture meanwhile are not spoilt.
    """

    step_bytes = 512 << 20  # 1.4 ms over NVLink: so blocks that lie side by side are runs long enough for its full rate
    depth = 4

    def __init__(self, device: int, *, max_ctas: int = 64) -> None:
        self.device = device
        self._max_ctas = max_ctas
        self._submitted = 0
        self._pieces = self._strips = np.empty((0, 5), dtype=np.int64)  # of the last step: the next often has the same
        with beside_captures(device), ExitStack() as undo:
            module = undo.enter_context(Module(compile_ptx(SOURCE.read_text(), device), device))
            self._function = module.function("copy_pairs")
            self._stream = undo.enter_context(Stream(device))
            self._slots = [undo.enter_context(_Slot(device)) for _ in range(self.depth)]
            with bound(device) as drv:
                self._batches = drv.copies_batches
                self._launch(drv, _nothing(), self._slots[0])  # what the first launch has to pay
                drv.stream_synchronize(self._stream.handle)
            self._undo: ExitStack | None = undo.pop_all()

    def submit(self, pairs: BlockPairs, *, same_gpu: bool = False) -> IsDone:
        slot = self._slots[self._submitted % self.depth]
        self._submitted += 1
        with beside_captures(self.device), bound(self.device) as drv:
            try:
                columns = self._for_copy_engine(pairs, same_gpu)
                if columns is None:
                    self._launch(drv, pairs, slot)
                else:
                    self._batch(drv, columns)
                drv.event_record(slot.event.handle, self._stream.handle)
            except CudaError:  # what was started before it failed must not be forgotten while it is under way
                with contextlib.suppress(CudaError):
                    drv.stream_synchronize(self._stream.handle)
                raise
        return partial(_reached, self.device, slot.event.handle)

    def close(self) -> None:
        """Give everything back, once nothing is under way; idempotent."""
        undo, self._undo = self._undo, None
        if undo is not None:
            with beside_captures(self.device):
                undo.close()

    def __enter__(self) -> CudaPairCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_undo", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<CudaPairCopier on device {self.device}, {'closed' if self._undo is None else 'ready'}>"

    def _for_copy_engine(self, pairs: BlockPairs, same_gpu: bool) -> Int64s | None:
        """What the copy engine is to copy; None where it is the kernel's."""
        if not self._batches or not (same_gpu or pairs.mostly_ascend()):
            return None
        columns = pairs.columns()
        return columns if columns[2].mean() >= (MIN_RUN_BYTES if same_gpu else _LONG_RUN_BYTES) else None

    def _batch(self, drv: Driver, columns: Int64s) -> None:
        for first in range(0, columns.shape[1], BATCH_ROWS):
            stop = min(first + BATCH_ROWS, columns.shape[1])
            copy_batch(drv, columns, first, stop, stream=self._stream.handle)

    def _launch(self, drv: Driver, pairs: BlockPairs, slot: _Slot) -> None:
        if pairs.pieces is not self._pieces:
            self._pieces, self._strips = pairs.pieces, pairs.strips()
        strips = self._strips
        ids = np.stack((pairs.to_ids, pairs.from_ids)).astype(np.int32)
        table = slot.reserve(drv, strips.nbytes + ids.nbytes)
        slot.kept = (strips, ids)
        drv.memcpy_h2d_async(table, strips.ctypes.data, strips.nbytes, self._stream.handle)
        to_ids = table + strips.nbytes
        if ids.nbytes:
            drv.memcpy_h2d_async(to_ids, ids.ctypes.data, ids.nbytes, self._stream.handle)
        blocks = ids.shape[1]
        grid = (min(self._max_ctas, -(-max(1, len(strips) * blocks) // WARPS)), 1, 1)
        args = [*map(c_uint64, (table, len(strips), to_ids, to_ids + 4 * blocks, blocks))]
        self._function.launch(grid, (THREADS, 1, 1), stream=self._stream.handle, args=args)


class _Slot:
    """An event, and device memory for what the kernel reads, of one step at a time."""

    def __init__(self, device: int) -> None:
        self.event = Event(device)
        self.kept: tuple[object, ...] = ()  # what the copies to the table read
        self._device = device
        self._table = 0
        self._nbytes = 0

    def reserve(self, drv: Driver, nbytes: int) -> int:
        """The address of at least that many bytes; what they held is gone."""
        if nbytes > self._nbytes:
            size = max(_FIRST_TABLE_BYTES, 1 << (nbytes - 1).bit_length())
            self._free(drv)
            self._table, self._nbytes = drv.mem_alloc(size), size
        return self._table

    def __enter__(self) -> _Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.event.close()
        with bound(self._device) as drv:
            self._free(drv)

    def _free(self, drv: Driver) -> None:
        table, self._table, self._nbytes = self._table, 0, 0
        if table:
            drv.mem_free(table)


def _nothing() -> BlockPairs:
    return BlockPairs(np.ones((5, 1), dtype=np.int64), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


def _reached(device: int, event: int) -> bool:
    with beside_captures(device), bound(device) as drv:
        return drv.event_query(event)
