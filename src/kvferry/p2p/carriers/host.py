"""The host carrier: everything over the session's link."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.p2p.carriers.base import Carrier, CarrierEvents
from kvferry.p2p.carriers.direct import DirectCarrier
from kvferry.p2p.carriers.links import Links
from kvferry.p2p.carriers.pushes.carrier import Tell
from kvferry.p2p.carriers.pushes.outlet import Post
from kvferry.p2p.carriers.staged import StagedCarrier
from kvferry.p2p.memory import Memory
from kvferry.p2p.signal.handshake import HOST_CARRIER
from kvferry.p2p.signal.messages import Go, NcclNew, Offer, Push, Ready
from kvferry.p2p.signal.session import Session


class HostCarrier:
    """Straight from and into host memory; through staging where an engine of the two has a GPU."""

    name = HOST_CARRIER

    def __init__(self, links: Links[Session], events: CarrierEvents, tell: Tell, post: Post) -> None:
        self._direct = DirectCarrier(links, events)
        self._staged = StagedCarrier(links, events, tell, post)

    def prepare(self, device_uuid: str) -> None:
        """Get ready to stage what is on this GPU, once. Raises CudaError, ShareError where that cannot be."""
        self._staged.prepare(device_uuid)

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        self._of(session).start_item(session, number, item, source)

    def start_early(self, session: Session, number: int, items: Sequence[int], source: Memory) -> Sequence[int]:
        return self._of(session).start_early(session, number, items, source)

    def stop_source(self, session: Session, number: int) -> None:
        self._of(session).stop_source(session, number)

    def peer_stopped(self, session: Session, number: int) -> None:
        self._of(session).peer_stopped(session, number)

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        self._of(session).expect(session, offer, destination)

    def ready(self, session: Session, message: Ready) -> None:
        self._of(session).ready(session, message)

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        return self._of(session).heard(session, message)

    def stop_landing(self, session: Session, number: int) -> None:
        self._of(session).stop_landing(session, number)

    def tick(self, now: float) -> None:
        self._direct.tick(now)
        self._staged.tick(now)

    def session_lost(self, session: Session) -> None:
        self._of(session).session_lost(session)

    def close(self) -> None:
        """Idempotent."""
        self._direct.close()
        self._staged.close()

    def _of(self, session: Session) -> Carrier:
        return self._staged if session.uses_gpu else self._direct
