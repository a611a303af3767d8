"""Making rings, sending them, opening them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.cuda.device import ordinal_of
from kvferry.cuda.driver import load_driver
from kvferry.errors import StaleHandleError, UnknownDeviceError, WireError
from kvferry.ipc.events.base import EventRing, PeerEvents
from kvferry.ipc.events.descriptor import EventsDescriptor, from_bytes, to_bytes
from kvferry.ipc.events.pages import DevicePage, HostPage, Page
from kvferry.ipc.events.peers import CudaPeerEvents, HostPeerEvents, SemaphorePeerEvents
from kvferry.ipc.events.rings import CudaEventRing, HostEventRing, SemaphoreRing, local_rings
from kvferry.ipc.events.tickets import check_slots
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.table import process_table
from kvferry.ipc.wire import close_fds, fd_slots

if TYPE_CHECKING:
    import torch


def make_event_ring(
    device: int | None, isolated_ipc: bool, slots: int = 64, *, in_device_memory: bool = False
) -> EventRing:
    """A ring for the work of this process on `device` (None: on the host); the caller closes it.

    Inter-process CUDA events, or, for processes that share no `/dev/shm`, timeline semaphores. These lie in shared host
    memory, or, for processes that can pass no file descriptor either, in device memory, where each look at them costs
    a copy.
    """
    if device is None:
        return HostEventRing(slots)
    if isolated_ipc:
        check_slots(slots)
        page: Page = DevicePage.make(device, slots) if in_device_memory else HostPage.make(slots)
        return SemaphoreRing(device, page, owns_page=True)
    return CudaEventRing(device, slots)


def make_peer_events(device: int, slots: int = 64, *, memory: torch.Tensor | None = None) -> SemaphorePeerEvents:
    """The waiting end of a ring of semaphores whose memory this process owns; the other one opens its end.

    So streams of this process can wait for the other's, with no file descriptor passed: `memory`, `slots` int64 values
    of a CUDA tensor, is sent by a raw handle. Without it, the memory is a page of shared host memory.
    """
    if memory is None:
        page: Page = HostPage.make(slots)
    else:
        device_page = DevicePage(RawCudaIPCWrapper(memory), device)
        device_page.clear()
        page = device_page
    return SemaphorePeerEvents(page, device, owns_page=True)


def encode_events(events: EventRing | SemaphorePeerEvents) -> tuple[bytes, list[int]]:
    """What the other process opens, and the file descriptors that travel beside it, which the caller closes."""
    descriptor = events.descriptor
    fds: list[int] = []
    try:
        for wrapper, index in fd_slots(descriptor.page):
            fds.append(wrapper.export_fd(index))
    except BaseException:
        close_fds(fds)
        raise
    return to_bytes(descriptor), fds


def open_events(data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> PeerEvents:
    """The waiting end of the ring that the other process made. Takes and closes `fds`, also on error.

    Raises
    ------
    WireError
        The bytes are no valid ring, or other file descriptors came than it needs; nothing was opened.
    ShareError
        It cannot be opened here.
    """
    descriptor = _read(data, fds, memory_of="recorder")
    if descriptor.backend == "cuda":
        return _open_cuda(descriptor)
    page = _open_page(descriptor)
    if descriptor.backend == "host":
        assert isinstance(page, HostPage)
        return HostPeerEvents(page)
    return SemaphorePeerEvents(page, _ordinal_or_none(descriptor.device_uuid), owns_page=False)


def _open_cuda(descriptor: EventsDescriptor) -> PeerEvents:
    if descriptor.exporter != process_table().token:
        return CudaPeerEvents.open(descriptor.handles, ordinal_of(descriptor.device_uuid))
    ring = local_rings().get(descriptor.handles[0])
    if ring is None or ring.closed:
        raise StaleHandleError("the ring of CUDA events was made in this process, and is closed")
    return CudaPeerEvents(ring.events)


def _ordinal_or_none(uuid: str) -> int | None:
    """The device's ordinal; None where it is not visible, which does not keep a process from polling host memory."""
    if load_driver() is None:
        return None
    try:
        return ordinal_of(uuid)
    except UnknownDeviceError:
        return None


def open_event_ring(data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> EventRing:
    """The recording end of the events that the waiting process made with `make_peer_events`; see `open_events`."""
    descriptor = _read(data, fds, memory_of="waiter")
    page = _open_page(descriptor)
    try:
        return SemaphoreRing(ordinal_of(descriptor.device_uuid), page, owns_page=False)
    except BaseException:
        page.close()
        raise


def _read(data: bytes | bytearray | memoryview, fds: Sequence[int], *, memory_of: str) -> EventsDescriptor:
    """The checked descriptor, its file descriptors handed to its page."""
    left = list(dict.fromkeys(fds))
    page = []
    try:
        descriptor = from_bytes(data)
        if descriptor.memory_of != memory_of:
            raise WireError(f"the page belongs to the process that is the {descriptor.memory_of}, not the {memory_of}")
        page = descriptor.page
        host_only = descriptor.backend == "host"
        if any(not isinstance(w, HostIPCWrapper if host_only else (HostIPCWrapper, RawCudaIPCWrapper)) for w in page):
            raise WireError(f"a {descriptor.backend} ring cannot have its values in {page}")
        slots = fd_slots(page)
        if len(slots) != len(fds) or len(left) != len(fds):
            raise WireError(f"the ring needs {len(slots)} file descriptors, {len(fds)} came")
        for wrapper, index in slots:
            wrapper.import_fd(index, left.pop(0))
    except BaseException:
        close_fds(left)
        for wrapper in page:
            wrapper.close()
        raise
    return descriptor


def _open_page(descriptor: EventsDescriptor) -> Page:
    [wrapper] = descriptor.page
    try:
        if isinstance(wrapper, HostIPCWrapper):
            return HostPage(wrapper)
        return DevicePage(wrapper, ordinal_of(descriptor.device_uuid))
    except BaseException:
        wrapper.close()
        raise
