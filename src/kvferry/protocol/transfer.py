"""Jobs: chunks from, and into, a rank's blocks."""

from __future__ import annotations

from kvferry.ipc.events import Ticket
from kvferry.protocol.message import BlockIds, Count, Keys, Message, Seconds, Seq, Stages


class Store(Message, frozen=True):
    """Keep the chunks of the chain `keys` from `start_chunk` on. `block_ids` cover all of the chain.

    The server reads once the event `ticket` is done (at once where there is none), or fails after `timeout_s`, of
    which no more than 600 count.
    """

    seq: Seq
    keys: Keys
    start_chunk: Count
    block_ids: BlockIds
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0


class Stored(Message, frozen=True):
    """Chunks written and there already, which a lookup finds; and skipped, for want of room or of a parent, or unsure.

    Unsure is what hangs on another store that has not ended.
    """

    seq: int
    num_stored: int
    num_present: int
    num_skipped: int


class Retrieve(Message, frozen=True):
    """Write this rank's share of a lease into `block_ids`, which cover all of it, but for the first `skip_blocks`.

    Blocks beyond the share are left alone. With `stages` above 1 (as many as planes at most): of P planes, stage `i`
    fills those from `i * P // stages` up to `(i + 1) * P // stages` in all blocks, and a Progress follows each but the
    last. A server that knows nothing of stages fills all at once, and sends none.
    """

    seq: Seq
    lease_id: Seq
    block_ids: BlockIds
    skip_blocks: Count = 0
    ticket: Ticket | None = None
    timeout_s: Seconds = 60.0
    stages: Stages = 1


class Progress(Message, frozen=True):
    """The first `stages` stages of the Retrieve `seq` are in place in all of its blocks. It goes on."""

    seq: int
    stages: int


class Retrieved(Message, frozen=True):
    """All bytes are in place."""

    seq: int
    num_chunks: int


class Cancel(Message, frozen=True):
    """Stop job `job` (the seq of a Store or Retrieve). The job's own reply comes once no byte can land any more."""

    job: Seq
