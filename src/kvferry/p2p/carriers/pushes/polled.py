"""Copies of a GPU that are looked after by a thread which polls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from kvferry.cuda.stream import Event
from kvferry.errors import CudaError
from kvferry.p2p.carriers.pushes.buffers import OnDone
from kvferry.p2p.carriers.pushes.gpu_copies import GpuCopies, prepare
from kvferry.p2p.carriers.pushes.run import Part, Run

Watch = Callable[[Event, Callable[[Exception | None], None]], None]


class PolledCopies:
    """All but the constructor and `close` is for the thread that `watch` polls in; `on_done` is called there, too."""

    def __init__(self, device: int, watch: Watch) -> None:
        """`watch` has a thread wait for an event and then call something. Raises CudaError."""
        self._copies = GpuCopies(device)
        self._watch = watch
        self._spare: list[Event] = []

    def prepare(self, run: Run) -> None:
        """The plan of what the kernel is to copy."""
        prepare(run)

    def copy(self, part: Part, slot: int, on_done: OnDone, *, to_flat: bool) -> None:
        """Start it."""
        stream = self._copies.stream
        try:
            self._copies.start(part, slot, to_flat=to_flat)
            event = self._spare.pop() if self._spare else Event(self._copies.device)
            event.record(stream.handle)
        except CudaError as error:
            with contextlib.suppress(CudaError):  # our own short kernels: nobody else's work is in this stream
                stream.synchronize()
            on_done(error)
            return
        self._watch(event, partial(self._ended, event, on_done))

    def close(self) -> None:
        """Give everything back, once all copies are done. Idempotent."""
        for event in self._spare:
            event.close()
        self._spare.clear()
        self._copies.close()

    def _ended(self, event: Event, on_done: OnDone, error: Exception | None) -> None:
        self._spare.append(event)
        on_done(error)
