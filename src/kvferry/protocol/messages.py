"""All messages between engines and the cache server: what travels, with the bounds that decoding enforces.

A request carries a `seq` that its reply repeats; `seq` is the client's to choose. Chunk keys and block ids travel as
one run of bytes each, KEY_BYTES a key and a little-endian int32 a block. Times are seconds.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.ipc.events import Ticket
from kvferry.ipc.fds import BATCH_FDS
from kvferry.layout import HASH_BYTES, KVLayout

PROTOCOL_VERSION = 2  # 2: tokens, prefetch, clear, waiting lookups, probes
OLDEST_VERSION = 1
MAX_FDS_A_BATCH = BATCH_FDS
NONCE_BYTES = 64
TOKEN_NONCE_BYTES = 32
MAC_BYTES = 32
MAX_WAIT_S = 60.0
NO_SEQ = 0  # in an Error: it answers no request in particular
KEY_BYTES = HASH_BYTES
BLOCK_ID_BYTES = 4

Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
Keys = Annotated[bytes, Meta(max_length=1 << 20)]
BlockIds = Annotated[bytes, Meta(max_length=4 << 20)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


def _tag(name: str) -> str:
    """`FdBatch` -> "fd_batch"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=_tag):
    """One frame. Fields that a receiver does not know are ignored, so that a later version may add some."""


class Hello(Message, frozen=True):
    """The first frame of a client: the versions that it speaks, `oldest` to `version`.

    Who has a token names it, and gives a nonce; the server then answers with a Challenge.
    """

    version: Count
    oldest: Count
    client: Annotated[str, Meta(max_length=512)] = ""
    token_name: Annotated[str, Meta(max_length=512)] = ""
    nonce: Annotated[bytes, Meta(max_length=TOKEN_NONCE_BYTES)] = b""


class Challenge(Message, frozen=True):
    """The server's nonce: prove that you have the token."""

    nonce: bytes


class Prove(Message, frozen=True):
    """A MAC over both nonces under the token, which itself is never sent."""

    mac: Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Welcome(Message, frozen=True):
    """The answer: the version that is spoken from here on. `incarnation` is new with every start of the server.

    `mac` is the server's own proof of the token. Where `heartbeat_s` is above 0, each side sends something at least
    that often, and takes the other for gone after three times as long.
    """

    version: int
    incarnation: bytes
    mac: bytes = b""
    heartbeat_s: float = 0.0


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


class Attach(Message, frozen=True):
    """Look up for `engine_id` from here on, without a KV cache of one's own."""

    seq: Seq
    engine_id: Name


class Attached(Message, frozen=True):
    """`ready` once all ranks are there; until then the sizes (in tokens) are 0."""

    seq: int
    ready: bool
    chunk_tokens: int = 0
    block_size: int = 0


class Lookup(Message, frozen=True):
    """How long a prefix of the chain `keys` do all ranks have? Pins it for `request_id`.

    What only lower tiers have begins to be loaded. The answer comes when that has ended, or after `wait_s`.
    """

    seq: Seq
    request_id: Name
    keys: Keys
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class Found(Message, frozen=True):
    """`tokens` of the prompt, held under `lease_id` (0 where there are none).

    `chunk_tokens` are those of the engine now, 0 while it is not ready; keys of chunks of another size find nothing.
    Up to `coming` tokens more are being loaded from lower tiers: ask again.
    """

    seq: int
    tokens: int
    lease_id: int
    chunk_tokens: int = 0
    coming: int = 0


class Prefetch(Message, frozen=True):
    """Load what lower tiers have of the chain `keys` into memory, for all ranks; promises nothing."""

    seq: Seq
    keys: Keys


class Prefetched(Message, frozen=True):
    """`tokens` are in memory now, up to `coming` more on their way."""

    seq: int
    tokens: int
    coming: int


class Clear(Message, frozen=True):
    """Forget the chain `keys` from `start_chunk` on and all that hangs from it; with no keys, all of the engine.

    It is gone for lookups at once, in all tiers; what a lease holds is delivered still.
    """

    seq: Seq
    keys: Keys = b""
    start_chunk: Count = 0


class Cleared(Message, frozen=True):
    """So many chunks of all ranks were in memory and are forgotten."""

    seq: int
    num_chunks: int


class Release(Message, frozen=True):
    """The lease is not needed any more. Not answered; a lease that is gone is no error."""

    lease_id: Seq


class Store(Message, frozen=True):
    """Keep the chunks of the chain `keys` from `start_chunk` on. `block_ids` cover all of the chain.

    The server reads once the event `ticket` is done (at once where there is none), or fails after `timeout_s`.
    """

    seq: Seq
    keys: Keys
    start_chunk: Count
    block_ids: BlockIds
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0


class Stored(Message, frozen=True):
    """Chunks written, there already, and skipped for want of room or of a parent."""

    seq: int
    num_stored: int
    num_present: int
    num_skipped: int


class Retrieve(Message, frozen=True):
    """Write this rank's share of a lease into `block_ids`, which cover all of it, but for the first `skip_blocks`.

    Blocks beyond the share are left alone.
    """

    seq: Seq
    lease_id: Seq
    block_ids: BlockIds
    skip_blocks: Count = 0
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0


class Retrieved(Message, frozen=True):
    """All bytes are in place."""

    seq: int
    num_chunks: int


class Cancel(Message, frozen=True):
    """Stop job `job` (the seq of a Store or Retrieve). The job's own reply comes once no byte can land any more."""

    job: Seq


class Stats(Message, frozen=True):
    """Ask for the server's counters."""

    seq: Seq


class StatsReply(Message, frozen=True):
    """The counters by name."""

    seq: int
    values: dict[str, float]


class Ping(Message, frozen=True):
    """Are you there?"""

    seq: Seq


class Pong(Message, frozen=True):
    """Yes."""

    seq: int


class Error(Message, frozen=True):
    """A request failed; with `seq` 0, the session did. `failed_blocks` of a retrieve hold no KV that may be used."""

    seq: int
    code: str
    text: str
    failed_blocks: bytes = b""


class Closed(Message, frozen=True):
    """The server's last frame of a session that it ends: nothing of it is in flight any more."""

    text: str


Request = (
    Hello
    | Prove
    | Register
    | FdBatch
    | Confirm
    | Unregister
    | Attach
    | Lookup
    | Prefetch
    | Clear
    | Release
    | Store
    | Retrieve
    | Cancel
    | Stats
    | Ping
)
Reply = (
    Welcome
    | Challenge
    | FdAck
    | Proof
    | Registered
    | Unregistered
    | Attached
    | Found
    | Prefetched
    | Cleared
    | Stored
    | Retrieved
    | StatsReply
    | Pong
    | Error
    | Closed
)
