"""The waiting ends: on the host, by CUDA events, by timeline semaphores."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvferry.cuda.device import device_uuid
from kvferry.cuda.stream import Event, wait_value64
from kvferry.errors import ShareError
from kvferry.ipc.events.base import PeerEvents
from kvferry.ipc.events.descriptor import VERSION, EventsDescriptor
from kvferry.ipc.events.pages import HostPage, Page
from kvferry.ipc.table import process_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ipc.events.tickets import Ticket


class HostPeerEvents(PeerEvents):
    """A page of values that the other process writes from its host side."""

    def __init__(self, page: HostPage) -> None:
        super().__init__(page.slots)
        self._page = page

    def _reached(self, ticket: Ticket) -> bool:
        return self._page.read(ticket.slot) >= ticket.value

    def _close(self) -> None:
        self._page.close()


class CudaPeerEvents(PeerEvents):
    """CUDA events of another process. They are polled only: a stream that waited for one could hang for ever.

    `events` belong to the ring when it is one of this process, and are closed by it.
    """

    def __init__(self, events: Sequence[Event], owned: contextlib.ExitStack | None = None) -> None:
        super().__init__(len(events))
        self._latest = [0] * len(events)  # the newest ticket seen in each slot
        self._events = events
        self._owned = owned or contextlib.ExitStack()

    @classmethod
    def open(cls, handles: Sequence[bytes], device: int) -> CudaPeerEvents:
        """The events behind another process's handles."""
        with contextlib.ExitStack() as undo:
            events = [undo.enter_context(Event.from_ipc_handle(handle, device)) for handle in handles]
            return cls(events, undo.pop_all())

    def _reached(self, ticket: Ticket) -> bool:
        if ticket.value < self._latest[ticket.slot]:
            return True  # the slot was used again, which the recorder does only after this one was reached
        self._latest[ticket.slot] = ticket.value
        return self._events[ticket.slot].query()

    def _close(self) -> None:
        self._owned.close()


class SemaphorePeerEvents(PeerEvents):
    """A page of values that the other process's streams write.

    Streams of this process may wait for a value where this process can store it too, whatever becomes of the other: in
    shared host memory, or in device memory of its own.
    """

    def __init__(self, page: Page, device: int | None, *, owns_page: bool) -> None:
        super().__init__(page.slots)
        self._page = page
        self._device = device
        self._owns_page = owns_page
        self._awaited: dict[int, int] = {}  # slot -> the newest value that a stream of ours waits for

    @property
    def descriptor(self) -> EventsDescriptor:
        """What the recording process opens with `open_event_ring`, when this process owns the page."""
        if not self._owns_page or self._device is None:
            raise ShareError("the process that records made these events, and has them already")
        return EventsDescriptor(
            kvferry_events=VERSION,
            backend="semaphore",
            memory_of="waiter",
            exporter=process_table().token,
            device_uuid=device_uuid(self._device),
            slots=self.slots,
            page=[self._page.wrapper],
        )

    def _reached(self, ticket: Ticket) -> bool:
        return self._page.read(ticket.slot) >= ticket.value

    def wait_on_stream(self, ticket: Ticket, stream: int | None = None) -> None:
        with self._gate:
            self._check(ticket)
            if not (self._owns_page or isinstance(self._page, HostPage)) or self._device is None:
                super().wait_on_stream(ticket, stream)
                return
            address = self._page.device_address(ticket.slot, self._device)
            with self._lock:
                self._awaited[ticket.slot] = max(ticket.value, self._awaited.get(ticket.slot, 0))
            wait_value64(stream or 0, address, ticket.value, device=self._device)
            if self._ended:  # abandoned in between, perhaps before the value was noted
                self._store_awaited()
                self._check(ticket)

    def abandon(self) -> None:
        super().abandon()
        with self._gate:
            if not self.closed:
                self._store_awaited()

    def _store_awaited(self) -> None:
        """Store every value that a stream of ours waits for, unless it is there; what failed can be tried again."""
        with self._lock:
            awaited = dict(self._awaited)
        for slot, value in awaited.items():
            if self._page.read(slot) < value:
                self._page.write(slot, value)
            with self._lock:
                if self._awaited.get(slot) == value:
                    del self._awaited[slot]

    def _close(self) -> None:
        self._page.close()
