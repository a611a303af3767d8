"""What travels of a ring of events, and its bytes: inert, versioned, checked; reading it opens nothing."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.cuda.functions import HANDLE_BYTES
from kvferry.errors import WireError
from kvferry.ipc.events.tickets import MAX_SLOTS
from kvferry.ipc.wire import enc_hook, ext_hook
from kvferry.ipc.wrapper import DeviceIPCWrapper

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20

Backend = Literal["host", "cuda", "semaphore"]


class EventsDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring of `slots` events.

    `memory_of` says whose the page of values is: that of the process that records, or that of the one that waits.
    `handles` are CUDA event handles, one a slot; `page` holds the wrapper of the page of 64-bit values. A back end has
    one of the two.
    """

    kvferry_events: int
    backend: Backend
    memory_of: Literal["recorder", "waiter"]
    exporter: bytes
    device_uuid: str
    slots: int
    handles: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()
    page: Annotated[list[DeviceIPCWrapper], msgspec.Meta(max_length=1)] = []

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"{self.slots} slots: wanted 1 to {MAX_SLOTS}")
        if (self.backend == "host") != (not self.device_uuid) or len(self.device_uuid) > 64:
            raise ValueError(f"a {self.backend} ring with device {self.device_uuid[:64]!r}")
        with_handles = self.backend == "cuda"
        if len(self.handles) != (self.slots if with_handles else 0) or len(self.page) != (not with_handles):
            raise ValueError(f"a {self.backend} ring of {self.slots} with {len(self.handles)} handles")
        if any(len(handle) != HANDLE_BYTES for handle in self.handles):
            raise ValueError(f"a CUDA event handle has {HANDLE_BYTES} bytes")
        for page in self.page:
            if page.descriptor.dtype != "int64" or page.shape != (self.slots,):
                raise ValueError(f"{page!r} is not a page of {self.slots} 64-bit values")
            if page.device_uuid not in ("", self.device_uuid):
                raise ValueError(f"{page!r} is on another device than the ring, which is on {self.device_uuid}")


class _Header(msgspec.Struct):
    kvferry_events: int


_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
_HEADERS = msgspec.msgpack.Decoder(_Header)
_DESCRIPTORS = msgspec.msgpack.Decoder(EventsDescriptor, ext_hook=ext_hook)


def to_bytes(descriptor: EventsDescriptor) -> bytes:
    return msgspec.msgpack.encode(descriptor, enc_hook=enc_hook)


def from_bytes(data: bytes | bytearray | memoryview) -> EventsDescriptor:
    """The descriptor in a message; its page is an importing wrapper that has opened nothing.

    Raises
    ------
    WireError
        The bytes are not a whole, valid message of this version, and nothing else.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"an events message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        version = _HEADERS.decode(data).kvferry_events
        if version != VERSION:
            raise WireError(f"events format {version} is not spoken here, only {VERSION}: update the older side")
        return _DESCRIPTORS.decode(data)
    except WireError:
        raise
    except _ERRORS as error:
        raise WireError(f"not a ring of events: {error}") from error
