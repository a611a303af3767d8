"""What the receiving side keeps of each transfer and each claim, and what it has done for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import Message, Offer
from kvferry.p2p.transfers.outgoing_records import Session

Place = object  # room in the receive buffer; what it is, the effects know


class InKey(NamedTuple):
    """`part` is the sender's, where several ranks send under one id."""

    transfer_id: str
    part: int


class State(enum.Enum):
    """What a transfer waits for; see docs/p2p.md."""

    OFFERED = "offered"
    LANDING = "landing"
    STOPPING = "stopping"
    KEPT = "kept"
    DELIVERING = "delivering"


@dataclass(slots=True, eq=False)
class Claim:
    """Somebody who waits for a transfer.

    `problem` says why an offer is not what is waited for. `destination` is the claimant's own memory, for all but the
    first `skip_blocks` blocks; None where the receive buffer is to lend some. `progress` is told of items that have
    landed. `deliver` is called once, with a place where there is no destination, or an error; nothing touches the
    destination any more then. `source` is the session to who is asked, or will send by itself: its end ends the claim.
    """

    key: InKey
    ends_at: float
    problem: Callable[[Offer], TransferError | None]
    deliver: Callable[[Place | None, TransferError | None], None]
    destination: object | None = None
    skip_blocks: int = 0
    progress: Callable[[Iterable[int]], None] = lambda _items: None
    source: Session = None


@dataclass(slots=True, eq=False)
class Incoming:
    """One transfer that was offered. `place` is what it holds of the receive buffer."""

    key: InKey
    session: Session
    offer: Offer
    offered_at: float
    ends_at: float
    state: State = State.OFFERED
    claim: Claim | None = None
    place: Place | None = None
    error: TransferError | None = None
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left.update(range(len(self.offer.item_bytes)))

    def may_read(self, items: Iterable[int]) -> None:
        """Some of its items are there before it has a place."""
        known = dict.fromkeys(item for item in (*self.offer.ready, *items) if item < len(self.offer.item_bytes))
        self.offer = msgspec.structs.replace(self.offer, ready=tuple(known))

    def is_late(self, now: float) -> bool:
        """Whether half of the time has passed in which it may wait for room."""
        return now > (self.offered_at + self.ends_at) / 2


class ReceiverEffects(Protocol):
    """What the receiving side has done for it; none of it waits."""

    def tell(self, session: Session, message: Message) -> None:
        """Send a message over a session; nothing happens where it is gone."""

    def unfit(self, session: Session, offer: Offer) -> TransferError | None:
        """What is wrong with an offer in itself; None where nothing is."""

    def too_large(self, offer: Offer) -> TransferError | None:
        """Why no room could ever be enough for it; None where some could, or where a claim may bring blocks."""

    def reserve(self, session: Session, offer: Offer) -> Place | None:
        """Room for the whole transfer, or None where there is not enough now."""

    def release(self, place: Place | None) -> None:
        """Give room back."""

    def held(self, session: Session) -> int:
        """Bytes of room that a session's transfers hold."""

    def expect(self, session: Session, offer: Offer, destination: object) -> None:
        """Let the carrier write what comes into a destination or place; the offer's lease is what is left of it."""

    def stop_landing(self, session: Session, number: int) -> None:
        """Let the carrier stop writing; it answers by `IncomingTable.landing_stopped`."""

    def copy(self, key: InKey, place: Place, destination: object, skip_blocks: int) -> None:
        """Copy what was kept, but for its first blocks, to a destination; answered by `IncomingTable.copied`."""
