"""What is there: lookups and their leases, prefetch, clear."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.protocol.message import MAX_WAIT_S, Count, Keys, Message, Name, Seq


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
