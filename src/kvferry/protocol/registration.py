"""A rank gives its KV cache, and takes it back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.layout import KVLayout
from kvferry.protocol.message import MAX_FDS_A_BATCH, Count, Message, Name, Positive, Seq


class Register(Message, frozen=True):
    """A rank gives its KV cache: `layout` over the storages that `wrappers` describe, one device for all.

    Once that is acknowledged come `num_fds` descriptors of the wrappers and `num_event_fds` of the events, in that
    order, in FdBatch frames of which each is acknowledged before the next. The server shows that it maps this memory by
    what it reads at `probes`, one offset in bytes a storage (each storage's start where there are none; see Proof).
    """

    seq: Seq
    engine_id: Name
    model: Name
    rank: Count
    world_size: Positive
    chunk_tokens: Positive
    device_uuid: Annotated[str, Meta(max_length=128)]
    layout: KVLayout
    wrappers: bytes
    num_fds: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    events: bytes = b""
    num_event_fds: Annotated[int, Meta(ge=0, le=MAX_FDS_A_BATCH)] = 0
    probes: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=1 << 16)] = ()


class FdBatch(Message, frozen=True):
    """`count` file descriptors travel with this frame's first byte; no other frame may carry any."""

    seq: Seq
    count: Annotated[int, Meta(ge=1, le=MAX_FDS_A_BATCH)]


class FdAck(Message, frozen=True):
    """The server has imported, and closed, the first `received` descriptors."""

    seq: int
    received: int


class Proof(Message, frozen=True):
    """What the server reads at the probes, or at the start of each storage, through its own mapping: up to 64 bytes."""

    seq: int
    nonces: tuple[bytes, ...]


class Confirm(Message, frozen=True):
    """The nonces are right: make the rank live. Where they are not, the client sends Unregister instead."""

    seq: Seq


class Registered(Message, frozen=True):
    """The rank is live."""

    seq: int


class Unregister(Message, frozen=True):
    """Drop the rank; answered once the server has unmapped its memory.

    The answer is an Error "mapped" where that takes too long: it may then be asked again.
    """

    seq: Seq


class Unregistered(Message, frozen=True):
    """The server has no mapping of the rank's memory any more."""

    seq: int
