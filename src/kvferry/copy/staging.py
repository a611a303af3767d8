"""One half of a GPU copy's staging: a device buffer and a stream."""

from __future__ import annotations

import time
from contextlib import ExitStack

from kvferry.copy.kernel import CopyKernel
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.stream import Event, Stream
from kvferry.errors import CudaError

_POLL_S = 0.001


class StagingHalf:
    """Takes one step after another. All work of a half is in one stream, so its buffer is reused in stream order.

    Methods that take the driver want the device's context to be current.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
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

    def submit(self, drv: Driver, step: Step, kernel: CopyKernel, *, to_flat: bool) -> None:
        """Put a step into the stream, then wait for the half's step before it: more than that is never under way."""
        if to_flat:
            kernel.launch(step, staging=self._buffer, stream=self.stream, to_flat=True)
            for flat, at, nbytes in step.ranges:
                drv.memcpy_async(flat, self._buffer + at, nbytes, self.stream)
        else:
            for flat, at, nbytes in step.ranges:
                drv.memcpy_async(self._buffer + at, flat, nbytes, self.stream)
            kernel.launch(step, staging=self._buffer, stream=self.stream, to_flat=False)
        drv.event_synchronize(self._event.handle)
        drv.event_record(self._event.handle, self.stream)

    def drain(self, drv: Driver) -> None:
        """Wait until nothing of this half is under way."""
        drain_event(drv, self._event.handle, self.stream)

    def close(self) -> None:
        """Give everything back, once drained; idempotent."""
        self._undo.close()

    def _free_buffer(self) -> None:
        with bound(self.device) as drv:
            drv.mem_free(self._buffer)


def drain_event(drv: Driver, event: int, stream: int) -> None:
    """Record the event, and wait until what is in the stream is done; polls at first, since waking up takes a while.

    Where the event cannot be recorded it waits all the same, then raises that.
    """
    try:
        drv.event_record(event, stream)
    except CudaError:
        drv.stream_synchronize(stream)
        raise
    deadline = time.perf_counter() + _POLL_S
    while not drv.event_query(event):
        if time.perf_counter() > deadline:
            drv.event_synchronize(event)
