"""Streams and events of our own. Streams are passed around as ints, such as torch's `stream.cuda_stream`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from kvferry.cuda.device import bound
from kvferry.cuda.driver import load_driver
from kvferry.cuda.functions import (
    CAPTURE_RELAXED,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    EVENT_INTERPROCESS,
    HANDLE_BYTES,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class _Owned:
    """A driver object that belongs to one device: closed once, warned about when it was not."""

    def __init__(self, device: int, handle: int) -> None:
        self.device = device
        self.handle = handle

    def _destroy(self, handle: int) -> None:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return not self.handle

    def close(self) -> None:
        """Destroy it; idempotent. Work that was given to it before still runs."""
        handle, self.handle = self.handle, 0  # of two threads that close, one finds it
        if handle and load_driver() is not None:  # None in a forked child, where the parent's object stays
            self._destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and load_driver() is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on device {self.device}, {'closed' if self.closed else hex(self.handle)}>"


class Stream(_Owned):
    """A stream that does not wait for the default stream; lower `priority` numbers go first."""

    def __init__(self, device: int, *, priority: int = 0) -> None:
        with bound(device) as drv:
            super().__init__(device, drv.stream_create(priority))

    def _destroy(self, handle: int) -> None:
        with bound(self.device) as drv:
            drv.stream_destroy(handle)

    def synchronize(self) -> None:
        """Block, with the GIL released, until all work in the stream is done."""
        with bound(self.device) as drv:
            drv.stream_synchronize(self.handle)

    def query(self) -> bool:
        """Whether all work in the stream is done."""
        with bound(self.device) as drv:
            return drv.stream_query(self.handle)

    def memcpy_async(self, dst: int, src: int, nbytes: int) -> None:
        """Copy between any two of device and pinned host memory, in stream order."""
        with bound(self.device) as drv:
            drv.memcpy_async(dst, src, nbytes, self.handle)

    def memset_async(self, dst: int, value: int, nbytes: int) -> None:
        with bound(self.device) as drv:
            drv.memset_async(dst, value, nbytes, self.handle)


class Event(_Owned):
    """A point in a stream, without timing. An interprocess one can be opened in another process."""

    def __init__(self, device: int, *, interprocess: bool = False) -> None:
        flags = EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC | (EVENT_INTERPROCESS if interprocess else 0)
        with bound(device) as drv:
            super().__init__(device, drv.event_create(flags))

    @classmethod
    def from_ipc_handle(cls, ipc_handle: bytes, device: int) -> Event:
        """Open another process's event on the same device; that process has to keep it until this one is closed."""
        if len(ipc_handle) != HANDLE_BYTES:
            raise ValueError(f"an event handle has {HANDLE_BYTES} bytes, got {len(ipc_handle)}")
        event = cls.__new__(cls)
        with bound(device) as drv:
            _Owned.__init__(event, device, drv.ipc_open_event_handle(ipc_handle))
        return event

    def ipc_handle(self) -> bytes:
        """What another process opens the event with, 64 bytes; for an interprocess event."""
        with bound(self.device) as drv:
            return drv.ipc_get_event_handle(self.handle)

    def _destroy(self, handle: int) -> None:
        with bound(self.device) as drv:
            drv.event_destroy(handle)

    def record(self, stream: int = 0) -> None:
        """Mark the end of the work that is in `stream` now."""
        with bound(self.device) as drv:
            drv.event_record(self.handle, stream)

    def query(self) -> bool:
        """Whether the last record is reached; True when there was none."""
        with bound(self.device) as drv:
            return drv.event_query(self.handle)

    def synchronize(self) -> None:
        """Block until the last record is reached. Never for a peer's event: poll `query` with a deadline."""
        with bound(self.device) as drv:
            drv.event_synchronize(self.handle)

    def wait_on_stream(self, stream: int) -> None:
        """Hold `stream`, of the same device, until the last record is reached."""
        with bound(self.device) as drv:
            drv.stream_wait_event(stream, self.handle)


def write_value64(stream: int, address: int, value: int, *, device: int) -> None:
    """Store the 64-bit `value` at a device (or mapped pinned) address, after all earlier work of the stream."""
    with bound(device) as drv:
        drv.stream_write_value64(stream, address, value)


def wait_value64(stream: int, address: int, value: int, *, device: int) -> None:
    """Hold the stream until the 64-bit word at the address has reached `value`."""
    with bound(device) as drv:
        drv.stream_wait_value64(stream, address, value)


def synchronize_device(device: int) -> None:
    """Block until all work that this process gave to the device before is done."""
    with bound(device) as drv:
        drv.context_synchronize()


@contextlib.contextmanager
def beside_captures(device: int) -> Iterator[None]:
    """Run the body such that its calls spoil no CUDA graph that another thread is capturing.

    Otherwise many would: while one thread captures, all others are kept from calls that could not be captured. The body
    has to leave the captured streams, and the default one, alone.
    """
    with bound(device) as drv:
        before = drv.exchange_capture_mode(CAPTURE_RELAXED)
        try:
            yield
        finally:
            drv.exchange_capture_mode(before)
