"""The recording ends: on the host, by CUDA events, by timeline semaphores."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING

from kvferry.cuda.device import device_uuid
from kvferry.cuda.stream import Event, write_value64
from kvferry.errors import ShareError
from kvferry.ipc.events.base import EventRing
from kvferry.ipc.events.descriptor import VERSION, EventsDescriptor
from kvferry.ipc.events.pages import HostPage, Page
from kvferry.ipc.table import process_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ipc.events.tickets import Ticket


@functools.cache
def local_rings() -> weakref.WeakValueDictionary[bytes, CudaEventRing]:
    """The rings of this process by their first handle: the driver opens a handle in other processes only."""
    return weakref.WeakValueDictionary()


class HostEventRing(EventRing):
    """Events between processes that work on the host: a page of values. What is recorded is done already."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._page = HostPage.make(slots)

    @property
    def descriptor(self) -> EventsDescriptor:
        return EventsDescriptor(
            kvferry_events=VERSION,
            backend="host",
            memory_of="recorder",
            exporter=process_table().token,
            device_uuid="",
            slots=self.slots,
            page=[self._page.wrapper],
        )

    def _signal(self, ticket: Ticket, stream: int) -> None:
        del stream
        self._page.write(ticket.slot, ticket.value)

    def reached(self, ticket: Ticket) -> bool:
        return self._page.read(ticket.slot) >= ticket.value

    def _close(self) -> None:
        self._page.close()


class CudaEventRing(EventRing):
    """CUDA inter-process events. The processes have to share `/dev/shm` and the pid namespace."""

    def __init__(self, device: int, slots: int) -> None:
        super().__init__(slots)
        self._device_uuid = device_uuid(device)
        with contextlib.ExitStack() as undo:
            self._events = [undo.enter_context(Event(device, interprocess=True)) for _ in range(slots)]
            self._handles = tuple(event.ipc_handle() for event in self._events)
            self._owned = undo.pop_all()
        local_rings()[self._handles[0]] = self

    @property
    def events(self) -> Sequence[Event]:
        """The events themselves, by slot, for the waiting end in this very process."""
        return self._events

    @property
    def descriptor(self) -> EventsDescriptor:
        return EventsDescriptor(
            kvferry_events=VERSION,
            backend="cuda",
            memory_of="recorder",
            exporter=process_table().token,
            device_uuid=self._device_uuid,
            slots=self.slots,
            handles=self._handles,
        )

    def _signal(self, ticket: Ticket, stream: int) -> None:
        self._events[ticket.slot].record(stream)

    def reached(self, ticket: Ticket) -> bool:
        return self._events[ticket.slot].query()

    def _close(self) -> None:
        self._owned.close()


class SemaphoreRing(EventRing):
    """Timeline semaphores: a stream stores the ticket's value when it comes to it. Needs no shared `/dev/shm`.

    `page` is closed with the ring. The ring `owns_page`, which the waiting process is then sent; else it is one that
    the waiting process made and sent here (`make_peer_events`).
    """

    def __init__(self, device: int, page: Page, *, owns_page: bool) -> None:
        self._page = page
        try:
            super().__init__(page.slots)
            self._device = device
            self._device_uuid = device_uuid(device)
            self._owns_page = owns_page
            page.device_address(0, device)
        except BaseException:
            page.close()
            raise

    @property
    def descriptor(self) -> EventsDescriptor:
        if not self._owns_page:
            raise ShareError("the process that waits made this ring, and has it already: there is nothing to send back")
        return EventsDescriptor(
            kvferry_events=VERSION,
            backend="semaphore",
            memory_of="recorder",
            exporter=process_table().token,
            device_uuid=self._device_uuid,
            slots=self.slots,
            page=[self._page.wrapper],
        )

    def _signal(self, ticket: Ticket, stream: int) -> None:
        address = self._page.device_address(ticket.slot, self._device)
        write_value64(stream, address, ticket.value, device=self._device)

    def reached(self, ticket: Ticket) -> bool:
        return self._page.read(ticket.slot) >= ticket.value

    def _close(self) -> None:
        self._page.close()
