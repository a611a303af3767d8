"""What every carrier does, whatever it moves bytes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.errors import TransferError
from kvferry.p2p.memory import Memory
from kvferry.p2p.signal.messages import Go, NcclNew, Offer, Push, Ready
from kvferry.p2p.signal.session import Session


class CarrierEvents(Protocol):
    """What a carrier tells, from any thread; each call only queues."""

    def released(self, number: int) -> None:
        """Nobody reads the source of a transfer any more: neither this engine nor its peer."""

    def item_landed(self, session: Session, number: int, *items: int) -> None:
        """All bytes of one item, or of several, are in their places."""

    def landing_stopped(self, session: Session, number: int) -> None:
        """Nothing writes into the places of a transfer any more."""

    def carrier_failed(self, session: Session, error: TransferError) -> None:
        """The carrier cannot go on in a session."""


class Carrier(Protocol):
    """Moves the bytes of accepted transfers. Called in the loop's thread; no call waits, and answers are events.

    `number` is the sender's of a transfer: unique in one engine on the sending side, in one session on the receiving.
    """

    name: str

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        """The receiver has a place for it, and its source bytes are there: move it."""

    def start_early(self, session: Session, number: int, items: Sequence[int], source: Memory) -> Sequence[int]:
        """Let the peer read items before it has accepted; none of them where the sender moves the bytes."""

    def stop_source(self, session: Session, number: int) -> None:
        """Read the source no more; the peer, where it reads, has been told so. Answered by `released`, once."""

    def peer_stopped(self, session: Session, number: int) -> None:
        """The peer says that it has all of a transfer, or that it touches nothing of it any more."""

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        """Let what the peer sends of a transfer land there."""

    def ready(self, session: Session, message: Ready) -> None:
        """The peer says that the source bytes of some items are there."""

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        """What the peer's carrier says to this one; False where it was not to be expected."""

    def stop_landing(self, session: Session, number: int) -> None:
        """Write no more; answered by `landing_stopped`, once."""

    def tick(self, now: float) -> None:
        """End the sessions of peers that are late; called every now and then."""

    def session_lost(self, session: Session) -> None:
        """A session has ended. Stop calls may still follow, and are answered."""

    def close(self) -> None:
        """End all; nothing is read or written when this returns. Idempotent."""
