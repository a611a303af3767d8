"""What two engines say to each other: typed, bounded records as msgpack.

Every message names the instance that sends it and the one that it is for. `number` is the sender's of a transfer.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
OLDEST_VERSION = 1
INSTANCE_BYTES = 16
NONCE_BYTES = 32
NOBODY = b"\0" * INSTANCE_BYTES
MAX_ID_CHARS = 1024
MAX_TAG_BYTES = 64
MAX_RUN_ITEMS = 4096

Instance = Annotated[bytes, Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(max_length=32)]
Number = Annotated[int, Meta(ge=1, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bytes = Annotated[int, Meta(ge=0, lt=1 << 50)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
TransferId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Word = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=2048)]
Address = Annotated[str, Meta(max_length=300)]
MAX_BLOCK_IDS = 32 << 10
BLOCK_ID_BYTES = 4
BlockIds = Annotated[bytes, Meta(max_length=BLOCK_ID_BYTES * MAX_BLOCK_IDS)]  # a little-endian int32 a block


def _tag(name: str) -> str:
    """`NoSuch` -> "no_such"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_tag):
    """One frame. Fields that a receiver does not know are ignored, so that a later version may add some.

    The session that sends it puts in who sends it to whom.
    """

    sender: Instance = NOBODY
    receiver: Instance = NOBODY


class LayerGeometry(msgspec.Struct, frozen=True, array_like=True):
    """One block of one layer: its axes in memory order as in "K2N16H8D64", and the sizes of the runs it lies in."""

    axes: Annotated[str, Meta(max_length=128)]
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    dtype: Word
    lengths: Annotated[tuple[Annotated[int, Meta(ge=1, lt=1 << 40)], ...], Meta(max_length=4096)]


class Geometry(msgspec.Struct, frozen=True):
    """What the blocks of a registered KV cache look like.

    Equal layers are told once: `layers` has the number of its kind for each layer of `names`. `num_kv_heads` are the
    rank's, 0 where layers differ or have none.
    """

    block_size: Annotated[int, Meta(ge=1, lt=1 << 31)]
    num_kv_heads: Count
    names: Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(min_length=1, max_length=4096)]
    kinds: Annotated[tuple[LayerGeometry, ...], Meta(max_length=64)]
    layers: Annotated[tuple[Annotated[int, Meta(ge=0, lt=64)], ...], Meta(min_length=1, max_length=4096)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Who an engine is. `address` is what it says of itself, for people; `ipc_path` where peers on its host come."""

    address: Address
    host_id: Word
    device_uuid: Word
    tp_rank: Count
    tp_size: Count
    carriers: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=16)]
    geometry: Geometry | None
    ipc_path: Word = ""


class Hello(Message, frozen=True, kw_only=True):
    """The first word, to nobody in particular."""

    oldest: Count
    version: Count
    nonce: Nonce


class Challenge(Message, frozen=True, kw_only=True):
    """The answer; `mac` is empty where there is no token."""

    version: Count
    nonce: Nonce
    mac: Mac


class Introduce(Message, frozen=True, kw_only=True):
    """The initiator's proof, and who it is."""

    mac: Mac
    about: About


class Welcome(Message, frozen=True, kw_only=True):
    """The session's carrier; the link is a connection to `link_port` that says `ticket` first.

    `why` says what kept the two from using a better carrier.
    """

    about: About
    carrier: Word
    link_port: Annotated[int, Meta(ge=1, le=65_535)]
    ticket: Nonce
    why: Text = ""


class Goodbye(Message, frozen=True, kw_only=True):
    """The end of the session, or the refusal of one."""

    code: Word
    text: Text


class Beat(Message, frozen=True, kw_only=True):
    """The sender lives."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor's bytes mean."""

    dtype: Word
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=32)]


Items = Annotated[tuple[Count, ...], Meta(max_length=4096)]
Tag = Annotated[bytes, Meta(max_length=MAX_TAG_BYTES)]


class Offer(Message, frozen=True, kw_only=True):
    """A transfer that the sender has ready: a `tensor`, or `num_blocks` blocks of all layers.

    `item_bytes` are those of the tensor, or of each layer. `part` is the sender's, where several ranks send under one
    id. `block_ids` are the sender's, where the receiver reads them itself, and may read the items that are `ready` from
    when it has a place for them. `tag` says what the KV is of: that of the claim has to be the same.
    """

    number: Number
    transfer_id: TransferId
    part: Count
    item_bytes: Annotated[tuple[Bytes, ...], Meta(min_length=1, max_length=4096)]
    lease_s: Seconds
    tensor: TensorMeta | None = None
    num_blocks: Count = 0
    block_ids: BlockIds = b""
    ready: Items = ()
    tag: Tag = b""

    def without(self, skip_blocks: int) -> Offer:
        """The same without its first blocks, which are fewer than all."""
        left = self.num_blocks - skip_blocks
        if not skip_blocks:
            return self
        sizes = tuple(nbytes // self.num_blocks * left for nbytes in self.item_bytes)
        ids = self.block_ids[BLOCK_ID_BYTES * skip_blocks :]
        return msgspec.structs.replace(self, num_blocks=left, item_bytes=sizes, block_ids=ids)


class Accept(Message, frozen=True, kw_only=True):
    """All bytes of the transfer have their places, but for its first `skip_blocks` blocks, which are not wanted."""

    number: Number
    skip_blocks: Count = 0


class Ready(Message, frozen=True, kw_only=True):
    """The source bytes of some items are there, for carriers that want to be told."""

    number: Number
    items: Items


class NcclNew(Message, frozen=True, kw_only=True):
    """The sender has made a communicator of two, as rank 0; the receiver joins it as rank 1."""

    unique_id: Annotated[bytes, Meta(min_length=128, max_length=128)]
    max_ctas: Annotated[int, Meta(ge=1, le=128)]


PartBytes = Annotated[int, Meta(ge=1 << 16, lt=1 << 50)]


class Push(Message, frozen=True, kw_only=True):
    """A run, ready to be sent behind those that were pushed before: all bytes of `items` items from `item` on.

    It goes in parts of at most `part_bytes`.
    """

    number: Number
    item: Count
    items: Annotated[int, Meta(ge=1, le=MAX_RUN_ITEMS)]
    nbytes: Bytes
    part_bytes: PartBytes


class Go(Message, frozen=True, kw_only=True):
    """There is a buffer for the first run that has none yet: both sides begin now, with parts of `part_bytes`."""

    part_bytes: PartBytes


class Landed(Message, frozen=True, kw_only=True):
    """All bytes of the transfer are in their places."""

    number: Number


class End(Message, frozen=True, kw_only=True):
    """The sender gives the transfer up."""

    number: Number
    code: Word
    text: Text


class Stopped(Message, frozen=True, kw_only=True):
    """The receiver refuses the transfer, or gives it up; it touches nothing of it any more."""

    number: Number
    code: Word
    text: Text


class Ask(Message, frozen=True, kw_only=True):
    """Please offer what is kept under this id, or will be within `wait_s`; `part` is the asker's."""

    transfer_id: TransferId
    part: Count
    wait_s: Seconds


class NoSuch(Message, frozen=True, kw_only=True):
    """Nothing is kept under this id."""

    transfer_id: TransferId
    part: Count
    code: Word
    text: Text


class Reject(Message, frozen=True, kw_only=True):
    """The receiver will never take what is kept, or offered, under this id."""

    transfer_id: TransferId
    part: Count


class Withdraw(Message, frozen=True, kw_only=True):
    """Nothing will come under this id; `part` is the sender's."""

    transfer_id: TransferId
    part: Count


AnyMessage: TypeAlias = (
    Hello
    | Challenge
    | Introduce
    | Welcome
    | Goodbye
    | Beat
    | Offer
    | Accept
    | Ready
    | NcclNew
    | Push
    | Go
    | Landed
    | End
    | Stopped
    | Ask
    | NoSuch
    | Reject
    | Withdraw
)
