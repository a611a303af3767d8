"""Bytes of a GPU over the session's link: through slots of host memory on both sides."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.cuda.device import ordinal_of
from kvferry.errors import CudaError, PeerGoneError, ProtocolError, ShareError
from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.carriers.link import Link
from kvferry.p2p.carriers.links import Links
from kvferry.p2p.carriers.pushes.carrier import PushCarrier, Tell
from kvferry.p2p.carriers.pushes.device_ring import DeviceRing, pinned_slots
from kvferry.p2p.carriers.pushes.host_ring import HostRing
from kvferry.p2p.carriers.pushes.inlet import Inlet
from kvferry.p2p.carriers.pushes.lane import Range
from kvferry.p2p.carriers.pushes.outlet import Outlet, Post
from kvferry.p2p.carriers.pushes.ring import Ring
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.signal.handshake import HOST_CARRIER
from kvferry.p2p.signal.session import Session

SLOT_BYTES = 4 << 20
SLOTS = 4  # for each direction


class LinkLane:
    """Exchanges slots over a link, in the order of the calls: one has been sent before the next begins.

    What is under way is known in the links' thread alone.
    """

    def __init__(self, links: Links[Session], session: Session, ring: Ring) -> None:
        self._links = links
        self._session = session
        self._ring = ring
        self._numbers = itertools.count(1)
        self._under_way: set[Future[None]] = set()
        self._to_send: deque[tuple[int, ByteRuns, Future[None]]] = deque()  # the first is being sent

    def exchange(
        self, *, sends: Sequence[Range] = (), receives: Sequence[Range] = (), timeout_s: float
    ) -> Future[None]:
        """One range, sent or received."""
        (slot,) = (*sends, *receives)
        number, runs = next(self._numbers), ByteRuns.single(*slot, self._ring)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._links.call(partial(self._under_way.add, future))
        if sends:
            self._links.use(self._session, partial(self._send, (number, runs, future)))
        else:
            then, until = partial(self._done, future), time.monotonic() + timeout_s
            self._links.use(self._session, lambda link: link.expect(number, 0, runs, then=then, until=until))
        return future

    def abort(self, reason: str) -> Future[Any]:
        """The link has been dropped before, so nobody touches the slots any more when this is done."""
        ended: Future[Any] = Future()
        self._links.call(partial(self._fail, reason, ended))
        return ended

    def _send(self, slot: tuple[int, ByteRuns, Future[None]], link: Link) -> None:
        self._to_send.append(slot)
        if len(self._to_send) == 1:
            self._start(link)

    def _start(self, link: Link) -> None:
        number, runs, _ = self._to_send[0]
        link.send(number, 0, runs, partial(self._sent, link))

    def _sent(self, link: Link) -> None:
        self._done(self._to_send.popleft()[2])
        if self._to_send:
            self._start(link)

    def _done(self, future: Future[None]) -> None:
        self._under_way.discard(future)
        future.set_result(None)

    def _fail(self, reason: str, ended: Future[Any]) -> None:
        while self._under_way:
            self._under_way.pop().set_exception(PeerGoneError("peer_gone", reason))
        ended.set_result(None)


class StagedCarrier(PushCarrier):
    """All but `prepare` and `close` is called in the loop's thread. Where one engine has a GPU, or both."""

    name = HOST_CARRIER

    def __init__(self, links: Links[Session], events: CarrierEvents, tell: Tell, post: Post) -> None:
        super().__init__(events, tell, post)
        self._links = links
        self._device_uuid = ""
        self._problem = ""

    def prepare(self, device_uuid: str) -> None:
        """Pin the slots of an engine that uses a GPU, once. Raises CudaError, ShareError where that cannot be."""
        if self._ring is not None:
            if self._device_uuid != device_uuid:
                raise ProtocolError(f"the slots are for another GPU than {device_uuid}: use another engine")
            return
        try:
            self._use(
                DeviceRing(ordinal_of(device_uuid), slots=2 * SLOTS, slot_bytes=SLOT_BYTES, allocate=pinned_slots)
            )
        except (CudaError, ShareError) as error:
            self._problem = str(error)
            raise
        self._device_uuid = device_uuid

    def _usable_ring(self, session: Session) -> Ring | None:
        if self._ring is None and not session.own.device_uuid:
            self._use(HostRing(slots=2 * SLOTS, slot_bytes=SLOT_BYTES))
        if self._ring is None:
            self._fail(session, ShareError(f"nothing can be staged in host memory: {self._problem}"))
        return self._ring

    def _connect_outlet(self, session: Session, outlet: Outlet) -> None:
        outlet.lane = LinkLane(self._links, session, outlet.ring)

    def _connect_inlet(self, session: Session, inlet: Inlet) -> None:
        inlet.lane = LinkLane(self._links, session, inlet.ring)
