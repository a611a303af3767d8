"""Protocol 1 as it was, frozen: messages and frames. Never changed, and nothing is taken from the package.

What speaks it here stands for engines and servers that have not been updated yet.
"""

from __future__ import annotations

import re
import socket
import struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta

VERSION = 1
MAX_FDS_A_BATCH = 128
NONCE_BYTES = 64
NO_SEQ = 0  # in an Error: it answers no request in particular
KEY_BYTES = 32
BLOCK_ID_BYTES = 4

Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
Keys = Annotated[bytes, Meta(max_length=1 << 20)]
BlockIds = Annotated[bytes, Meta(max_length=4 << 20)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=_tag):
    """Unknown fields are ignored, unknown tags are errors."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slot: int
    value: int


class Plane(msgspec.Struct, frozen=True, array_like=True):
    storage: int
    offset: int
    stride: int
    length: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    block_size: int
    num_blocks: int
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    planes: tuple[Plane, ...]
    axis_order: str = ""
    isa: str = ""
    layer_names: tuple[tuple[str, ...], ...] = ()


class Hello(Message, frozen=True):
    version: Count
    oldest: Count
    client: str = ""


class Welcome(Message, frozen=True):
    version: int
    incarnation: bytes


class Register(Message, frozen=True):
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


class FdBatch(Message, frozen=True):
    seq: Seq
    count: Annotated[int, Meta(ge=1, le=MAX_FDS_A_BATCH)]


class FdAck(Message, frozen=True):
    seq: int
    received: int


class Proof(Message, frozen=True):
    seq: int
    nonces: tuple[bytes, ...]


class Confirm(Message, frozen=True):
    seq: Seq


class Registered(Message, frozen=True):
    seq: int


class Unregister(Message, frozen=True):
    seq: Seq


class Unregistered(Message, frozen=True):
    seq: int


class Attach(Message, frozen=True):
    seq: Seq
    engine_id: Name


class Attached(Message, frozen=True):
    seq: int
    ready: bool
    chunk_tokens: int = 0
    block_size: int = 0


class Lookup(Message, frozen=True):
    seq: Seq
    request_id: Name
    keys: Keys


class Found(Message, frozen=True):
    seq: int
    tokens: int
    lease_id: int
    chunk_tokens: int = 0


class Release(Message, frozen=True):
    lease_id: Seq


class Store(Message, frozen=True):
    seq: Seq
    keys: Keys
    start_chunk: Count
    block_ids: BlockIds
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0


class Stored(Message, frozen=True):
    seq: int
    num_stored: int
    num_present: int
    num_skipped: int


class Retrieve(Message, frozen=True):
    seq: Seq
    lease_id: Seq
    block_ids: BlockIds
    skip_blocks: Count = 0
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0


class Retrieved(Message, frozen=True):
    seq: int
    num_chunks: int


class Cancel(Message, frozen=True):
    job: Seq


class Stats(Message, frozen=True):
    seq: Seq


class StatsReply(Message, frozen=True):
    seq: int
    values: dict[str, float]


class Ping(Message, frozen=True):
    seq: Seq


class Pong(Message, frozen=True):
    seq: int


class Error(Message, frozen=True):
    seq: int
    code: str
    text: str
    failed_blocks: bytes = b""


class Closed(Message, frozen=True):
    text: str


Request = (
    Hello
    | Register
    | FdBatch
    | Confirm
    | Unregister
    | Attach
    | Lookup
    | Release
    | Store
    | Retrieve
    | Cancel
    | Stats
    | Ping
)
Reply = (
    Welcome
    | FdAck
    | Proof
    | Registered
    | Unregistered
    | Attached
    | Found
    | Stored
    | Retrieved
    | StatsReply
    | Pong
    | Error
    | Closed
)


_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def read(sock: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """The next message and its descriptors. Raises EOFError at the end of the stream."""
    head, fds = _exactly(sock, _LENGTH.size)
    body, more = _exactly(sock, _LENGTH.unpack(head)[0])
    return msgspec.msgpack.decode(body, type=kind), fds + more


def _exactly(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    data, fds = b"", list[int]()
    while len(data) < nbytes:
        piece, more, _, _ = socket.recv_fds(sock, nbytes - len(data), MAX_FDS_A_BATCH)
        fds += more
        if not piece:
            raise EOFError
        data += piece
    return data, fds
