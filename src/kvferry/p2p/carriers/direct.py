"""Bytes of host memory over the session's link, straight from and into their places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.carriers.links import Links
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import BlockMemory, Memory
from kvferry.p2p.signal.handshake import HOST_CARRIER
from kvferry.p2p.signal.messages import Go, NcclNew, Offer, Push, Ready
from kvferry.p2p.signal.session import Session


class DirectCarrier:
    """Where neither engine has a GPU. All bytes move in the links' thread.

    The sender pushes, so nobody but it reads the source.
    """

    name = HOST_CARRIER

    def __init__(self, links: Links[Session], events: CarrierEvents) -> None:
        self._links = links
        self._events = events

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        """Queue it; frames of several items take turns."""
        runs = source.runs(item, _pieces(session, source, item))
        self._links.use(session, lambda link: link.send(number, item, runs))

    def start_early(self, session: Session, number: int, items: Sequence[int], source: Memory) -> Sequence[int]:
        """Nothing: the peer does not read the source."""
        return ()

    def stop_source(self, session: Session, number: int) -> None:
        """What the socket has not taken yet of a frame goes out from a copy."""
        self._links.stop_sending(session, number, partial(self._events.released, number))

    def peer_stopped(self, session: Session, number: int) -> None:
        """Nothing: the peer does not read the source."""

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        """Let all its items land."""
        for item in range(len(offer.item_bytes)):
            runs = destination.runs(item, _pieces(session, destination, item))
            self._links.use(session, lambda link, item=item, runs=runs: link.expect(offer.number, item, runs))  # type: ignore[misc]

    def ready(self, session: Session, message: Ready) -> None:
        """Nothing: what is ready comes."""

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        """Nothing is pushed through slots here."""
        return False

    def stop_landing(self, session: Session, number: int) -> None:
        """What still comes of it is read and dropped."""
        self._links.stop_landing(session, number, partial(self._events.landing_stopped, session, number))

    def tick(self, now: float) -> None:
        """Nothing: no peer has to answer."""

    def session_lost(self, session: Session) -> None:
        """Nothing: the link is dropped with the session."""

    def close(self) -> None:
        """Nothing: the links are closed by their owner."""


def _pieces(session: Session, memory: Memory, item: int) -> tuple[Piece, ...]:
    """Which bytes of a layer's blocks go over the session; flat memory goes whole."""
    return session.pieces(item) if isinstance(memory, BlockMemory) else ()
