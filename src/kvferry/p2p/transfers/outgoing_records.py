"""What the sending side keeps of each transfer, and what it has done for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import Message, Offer

Session = Hashable
Outcome = TransferError | None


class SenderEffects(Protocol):
    """What the sending side has done for it; none of it waits."""

    def fitted(self, session: Session, offer: Offer) -> Offer | TransferError:
        """The offer as it is for the peer of a session, or why there is none."""

    def tell(self, session: Session, message: Message) -> None:
        """Send a message over a session; nothing happens where it is gone."""

    def skip_blocks(self, number: int, skip_blocks: int) -> None:
        """The first blocks of a transfer are not wanted."""

    def start_item(self, session: Session, number: int, item: int) -> None:
        """Let the carrier read the source of one item."""

    def start_early(self, session: Session, number: int, items: Sequence[int]) -> Sequence[int]:
        """The same for a peer that reads by itself, and has not accepted yet; those items that it may read."""

    def stop_source(self, session: Session, number: int) -> None:
        """Let the carrier stop reading; it answers by `OutgoingTable.released`, also where it had already stopped."""

    def peer_stopped(self, session: Session, number: int) -> None:
        """The peer says that it touches nothing of the transfer any more."""


class State(enum.Enum):
    """What a transfer waits for; see docs/p2p.md."""

    KEPT = "kept"
    CONNECTING = "connecting"
    OFFERED = "offered"
    SENDING = "sending"
    ENDING = "ending"


class OutKey(NamedTuple):
    """`target` is an address, or the part of the reader that will ask."""

    transfer_id: str
    target: str | int


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer. `done` is called once, when the source is not read any more."""

    key: OutKey
    number: int
    offer: Offer
    lease_ends_at: float
    done: Callable[[Outcome], None]
    ready: set[int]
    state: State = State.KEPT
    session: Session = None
    started: set[int] = field(default_factory=set)
    outcome: Outcome = None
    overdue: bool = False
