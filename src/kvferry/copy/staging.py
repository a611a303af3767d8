"""One half of a GPU copy's staging: a device buffer and a stream."""

from __future__ import annotations

import time
from contextlib import ExitStack

from kvferry.copy.kernel import CopyKernel
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.stream import Event, Stream

_POLL_S = 0.001


class StagingHalf:
    """Takes one step after another, in a stream of its own.

    A kernel is launched only when it can run at once: one that waits in its stream for a copy keeps the turn of this
    process on the GPU open, and the engine, another process there, gives up part of its time for nothing. So it is the
    host that waits, while the copy engine works on the other half.

    Methods that take the driver want the device's context to be current.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self._fetched: Step | None = None
        with ExitStack() as undo:
            self._stream = undo.enter_context(Stream(device))
            self._event = undo.enter_context(Event(device))
            with bound(device) as drv:
                self._buffer = drv.mem_alloc(nbytes)
            undo.callback(self._free_buffer)
            self._undo = undo.pop_all()

    @property
    def stream(self) -> int:
        return self._stream.handle

    def follow(self, drv: Driver, other: StagingHalf) -> None:
        """Begin only after what is in the other half's stream now."""
        drv.event_record(self._event.handle, other.stream)
        drv.stream_wait_event(self.stream, self._event.handle)

    def settle(self, drv: Driver) -> None:
        """Wait until the half's last step is done, so that its buffer is free."""
        drv.event_synchronize(self._event.handle)

    def gather(self, drv: Driver, step: Step, kernel: CopyKernel) -> None:
        """Start a step from the paged to the flat side; the half is settled."""
        kernel.launch(step, staging=self._buffer, stream=self.stream, to_flat=True)
        for flat, at, nbytes in step.ranges:
            drv.memcpy_async(flat, self._buffer + at, nbytes, self.stream)
        drv.event_record(self._event.handle, self.stream)

    def fetch(self, drv: Driver, step: Step) -> None:
        """Start the first part of a step from the flat to the paged side, into the buffer; the half is settled."""
        for flat, at, nbytes in step.ranges:
            drv.memcpy_async(self._buffer + at, flat, nbytes, self.stream)
        drv.event_record(self._event.handle, self.stream)
        self._fetched = step

    def spread(self, drv: Driver, kernel: CopyKernel) -> None:
        """Wait until what was fetched is there, and start the rest of its step; nothing where there is nothing."""
        step, self._fetched = self._fetched, None
        if step is None:
            return
        self.settle(drv)
        kernel.launch(step, staging=self._buffer, stream=self.stream, to_flat=False)
        drv.event_record(self._event.handle, self.stream)

    def drain(self, drv: Driver) -> None:
        """Wait until nothing of this half is under way; polls at first, since to be woken up takes a while.

        What was fetched and not spread is dropped.
        """
        self._fetched = None
        drv.event_record(self._event.handle, self.stream)
        deadline = time.perf_counter() + _POLL_S
        while not drv.event_query(self._event.handle):
            if time.perf_counter() > deadline:
                drv.event_synchronize(self._event.handle)

    def close(self) -> None:
        """Give everything back, once drained; idempotent."""
        self._undo.close()

    def _free_buffer(self) -> None:
        with bound(self.device) as drv:
            drv.mem_free(self._buffer)
