"""What all messages have in common: the base, the versions, and the bounds that decoding enforces.

A request carries a `seq` that its reply repeats; `seq` is the client's to choose. Chunk keys and block ids travel as
one run of bytes each, KEY_BYTES a key and a little-endian int32 a block. Times are seconds.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.ipc.fds import BATCH_FDS
from kvferry.layout import HASH_BYTES

PROTOCOL_VERSION = 2  # 2: tokens, prefetch, clear, waiting lookups, probes
OLDEST_VERSION = 1
MAX_FDS_A_BATCH = BATCH_FDS
NONCE_BYTES = 64
TOKEN_NONCE_BYTES = 32
MAC_BYTES = 32
MAX_WAIT_S = 60.0
MAX_HEARTBEAT_S = 3600.0
NO_SEQ = 0  # in an Error: it answers no request in particular
KEY_BYTES = HASH_BYTES
BLOCK_ID_BYTES = 4
MAX_STAGES = 256

Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
Stages = Annotated[int, Meta(ge=1, le=MAX_STAGES)]
Keys = Annotated[bytes, Meta(max_length=1 << 20)]
BlockIds = Annotated[bytes, Meta(max_length=4 << 20)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


def _tag(name: str) -> str:
    """`FdBatch` -> "fd_batch"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=_tag):
    """One frame. Fields that a receiver does not know are ignored, so that a later version may add some."""
