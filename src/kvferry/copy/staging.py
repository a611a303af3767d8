"""One half of a GPU copy's staging: a device buffer, a stream, and a table of pieces that the kernel reads."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack

import numpy as np

from kvferry.copy.plan import Int64s
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.memory import host_device_pointer, register_host, unregister_host
from kvferry.cuda.nvrtc import Function
from kvferry.cuda.stream import Event, Stream

MAX_PIECES = 32_768
_ROW_WORDS = 4  # source, target, bytes, unused: struct Piece of copy_runs.cu
_TABLE_BYTES = MAX_PIECES * _ROW_WORDS * 8
_THREADS = 512
_WARPS = _THREADS // 32


class StagingHalf:
    """Runs one step at a time. All work of a half is in one stream, so its buffer is reused in stream order.

    Methods that take the driver want the device's context to be current.
    """

    def __init__(self, device: int, nbytes: int, *, max_ctas: int) -> None:
        self.device = device
        self._max_ctas = max_ctas
        with ExitStack() as undo:
            self._stream = undo.enter_context(Stream(device))
            # Recorded after each step's kernel: from then on the table may be written again.
            self._event = undo.enter_context(Event(device))
            with bound(device) as drv:
                self._buffer = drv.mem_alloc(nbytes)
            undo.callback(self._free_buffer)
            # Pinned and mapped. The array holds the pages: they go with the last reference to it.
            pages = mmap.mmap(-1, _TABLE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._table = np.frombuffer(pages, dtype=np.int64).reshape(MAX_PIECES, _ROW_WORDS)
            address = self._table.ctypes.data
            register_host(address, _TABLE_BYTES, device=device)
            undo.callback(unregister_host, address, device=device)
            self._table_on_device = host_device_pointer(address, device=device)
            self._undo = undo.pop_all()

    def warm(self, drv: Driver, kernel: Function) -> None:
        """Run the kernel once, on nothing."""
        self._start(drv, kernel, ctas=1, count=0)
        drv.event_synchronize(self._event.handle)

    def gather(self, drv: Driver, step: Step, kernel: Function) -> None:
        """Put paged memory -> buffer -> flat memory into the stream; waits for the half's last kernel only."""
        self._launch(drv, step, kernel, sources=step.pieces.paged, targets=step.staged + self._buffer)
        for flat, staged, nbytes in step.ranges:
            drv.memcpy_async(flat, self._buffer + staged, nbytes, self._stream.handle)

    def scatter(self, drv: Driver, step: Step, kernel: Function) -> None:
        """Put flat memory -> buffer -> paged memory into the stream; waits for the half's last kernel only."""
        for flat, staged, nbytes in step.ranges:
            drv.memcpy_async(self._buffer + staged, flat, nbytes, self._stream.handle)
        self._launch(drv, step, kernel, sources=step.staged + self._buffer, targets=step.pieces.paged)

    def drain(self) -> None:
        """Wait until nothing of this half is under way."""
        self._event.record(self._stream.handle)
        self._event.synchronize()

    def close(self) -> None:
        """Give everything back, once drained; idempotent."""
        self._undo.close()

    def _launch(self, drv: Driver, step: Step, kernel: Function, *, sources: Int64s, targets: Int64s) -> None:
        count = len(step.staged)
        assert count <= MAX_PIECES
        drv.event_synchronize(self._event.handle)
        self._table[:count, 0] = sources
        self._table[:count, 1] = targets
        self._table[:count, 2] = step.pieces.nbytes
        self._start(drv, kernel, ctas=min(self._max_ctas, -(-count // _WARPS)), count=count)

    def _start(self, drv: Driver, kernel: Function, *, ctas: int, count: int) -> None:
        arguments = (ctypes.c_uint64(self._table_on_device), ctypes.c_uint32(count))
        kernel.launch((ctas, 1, 1), (_THREADS, 1, 1), stream=self._stream.handle, args=arguments)
        drv.event_record(self._event.handle, self._stream.handle)

    def _free_buffer(self) -> None:
        with bound(self.device) as drv:
            drv.mem_free(self._buffer)
