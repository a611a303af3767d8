"""What sessions need of the other parts, and whom they tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import About, AnyMessage
from kvferry.p2p.signal.session import Session


class Links(Protocol):
    """The connections beside ZMQ; calls only queue. Answered by `link_up` and `link_lost`."""

    port: int

    def await_ticket(self, session: Session, ticket: bytes) -> None:
        """A peer will come with this ticket."""

    def connect(self, session: Session, host: str, port: int, ticket: bytes) -> None:
        """Go to a peer."""

    def confirm(self, session: Session) -> None:
        """Tell the peer that came that its session is up."""

    def drop(self, session: Session) -> None:
        """The session has ended."""


class Mapper(Protocol):
    """The carrier for which two engines map each other's memory before their session has it; calls only queue."""

    def await_peer(self, session: Session, ticket: bytes) -> None:
        """The acceptor may come with this ticket."""

    def map_peer(self, session: Session, ticket: bytes, then: Callable[[str], None]) -> None:
        """Go to the initiator; `then` is called with what keeps the two from mapping each other's, or ""."""

    def has_mapped(self, session: Session, about: About) -> bool:
        """Whether that worked, with the engine that this is said of."""

    def forget(self, session: Session) -> None:
        """The session has another carrier, or has ended without one."""


class Listener(Protocol):
    """Whom sessions are for."""

    def session_up(self, session: Session) -> None:
        """It can be used."""

    def session_lost(self, session: Session, error: TransferError) -> None:
        """It has ended; called once, also for one that never was up."""

    def heard(self, session: Session, message: AnyMessage) -> None:
        """A message that is not the session's own business."""
