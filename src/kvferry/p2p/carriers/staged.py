"""Bytes of a GPU over the session's link: through slots of host memory on both sides."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from kvferry.cuda.device import ordinal_of
from kvferry.errors import CudaError, PeerGoneError, ProtocolError, ShareError
from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.carriers.link import Link
from kvferry.p2p.carriers.links import Links
from kvferry.p2p.carriers.pushes.buffers import Buffer
from kvferry.p2p.carriers.pushes.carrier import PushCarrier, Tell
from kvferry.p2p.carriers.pushes.device_ring import DeviceRing
from kvferry.p2p.carriers.pushes.host_ring import HostRing
from kvferry.p2p.carriers.pushes.inlet import Inlet
from kvferry.p2p.carriers.pushes.lane import Range
from kvferry.p2p.carriers.pushes.outlet import Outlet, Post
from kvferry.p2p.carriers.pushes.ring import Ring
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.signal.handshake import HOST_CARRIER
from kvferry.p2p.signal.session import Session

SLOT_BYTES = 4 << 20
SLOTS = 3
BUFFERS = 2  # for each direction
_SLOT, _GRANT = 0, 1  # the items of an exchange
_GRANTS = 4 * SLOTS  # that are waited for at once: the peer is never so many slots ahead


class _Slot(NamedTuple):
    """One that is sent."""

    number: int
    runs: ByteRuns
    future: Future[None]
    until: float


class LinkLane:
    """Exchanges slots over a link, in the order of the calls: one has been sent before the next begins.

    As nothing holds up what comes over a link for which there is no place, the receiver says of each slot that it has
    one, by an empty item. What is under way is known in the links' thread alone.
    """

    def __init__(self, links: Links[Session], session: Session, owner: object, *, sends: bool) -> None:
        """`owner` keeps the memory of the slots. A lane `sends`, or receives: a session may have one of each."""
        self._links = links
        self._session = session
        self._owner = owner
        self._numbers = itertools.count(1)
        self._under_way: set[Future[None]] = set()
        self._to_send: deque[_Slot] = deque()
        self._sending = False  # the first of them
        self._granted = 0  # slots that the peer has, or had, a place for
        self._aborted = ""  # why
        for number in range(1, _GRANTS + 1) if sends else ():
            self._links.use(session, partial(self._await_grant, number))

    def exchange(
        self, *, sends: Sequence[Range] = (), receives: Sequence[Range] = (), timeout_s: float
    ) -> Future[None]:
        """One range, sent or received."""
        (slot,) = (*sends, *receives)
        number, runs = next(self._numbers), ByteRuns.single(*slot, self._owner)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        until = time.monotonic() + timeout_s
        self._links.call(partial(self._begin, future))
        if sends:
            self._links.use(self._session, partial(self._send, _Slot(number, runs, future, until)))
        else:
            self._links.use(self._session, partial(self._receive, number, runs, future, until))
        return future

    def call(self, task: Callable[[], None]) -> None:
        """In the links' thread."""
        self._links.call(task)

    def abort(self, reason: str) -> Future[Any]:
        """The link has been dropped before, so nobody touches the slots any more when this is done."""
        ended: Future[Any] = Future()
        self._links.call(partial(self._fail, reason, ended))
        return ended

    def _begin(self, future: Future[None]) -> None:
        if self._aborted:
            future.set_exception(PeerGoneError("peer_gone", self._aborted))
        else:
            self._under_way.add(future)

    def _receive(self, number: int, runs: ByteRuns, future: Future[None], until: float, link: Link) -> None:
        link.expect(number, _SLOT, runs, then=partial(self._done, future), until=until)
        link.send(number, _GRANT, ByteRuns.single(0, 0, None))

    def _await_grant(self, number: int, link: Link, until: float = math.inf) -> None:
        then = partial(self._on_grant, link, number)
        link.expect(number, _GRANT, ByteRuns.single(0, 0, None), then=then, until=until)

    def _on_grant(self, link: Link, number: int) -> None:
        self._granted = number
        self._await_grant(number + _GRANTS, link)
        self._go_on(link)

    def _send(self, slot: _Slot, link: Link) -> None:
        self._to_send.append(slot)
        if slot.number > self._granted:
            self._await_grant(slot.number, link, slot.until)
        self._go_on(link)

    def _go_on(self, link: Link) -> None:
        if self._to_send and not self._sending and self._to_send[0].number <= self._granted:
            self._sending = True
            slot = self._to_send[0]
            link.send(slot.number, _SLOT, slot.runs, then=partial(self._sent, link), until=slot.until)

    def _sent(self, link: Link) -> None:
        self._sending = False
        self._done(self._to_send.popleft().future)
        self._go_on(link)

    def _done(self, future: Future[None]) -> None:
        self._under_way.discard(future)
        future.set_result(None)

    def _fail(self, reason: str, ended: Future[Any]) -> None:
        self._aborted = reason
        while self._under_way:
            self._under_way.pop().set_exception(PeerGoneError("peer_gone", reason))
        ended.set_result(None)


class StagedCarrier(PushCarrier):
    """All but `prepare` and `close` is called in the loop's thread. Where one engine has a GPU, or both."""

    name = HOST_CARRIER

    def __init__(self, links: Links[Session], events: CarrierEvents, tell: Tell, post: Post) -> None:
        super().__init__(events, tell, post)
        self._links = links
        self._ring: Ring | None = None
        self._device_uuid = ""
        self._problem = ""

    def prepare(self, device_uuid: str) -> None:
        """Pin the slots of an engine that uses a GPU, once. Raises CudaError, ShareError where that cannot be."""
        if self._ring is not None:
            if self._device_uuid != device_uuid:
                raise ProtocolError(f"the slots are for another GPU than {device_uuid}: use another engine")
            return
        try:
            self._fill_with(DeviceRing(ordinal_of(device_uuid), slots=2 * BUFFERS * SLOTS, slot_bytes=SLOT_BYTES))
        except (CudaError, ShareError) as error:
            self._problem = str(error)
            raise
        self._device_uuid = device_uuid

    def close(self) -> None:
        """End the ring. Idempotent; waits, but not without end."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _fill_with(self, ring: Ring) -> None:
        self._ring = ring
        starts = range(0, len(ring.addresses), SLOTS)
        self._use([Buffer(ring.addresses[start : start + SLOTS], ring.slot_bytes, ring) for start in starts])

    def _is_ready(self, session: Session) -> bool:
        if self._ring is None and not session.own.device_uuid:
            self._fill_with(HostRing(slots=2 * BUFFERS * SLOTS, slot_bytes=SLOT_BYTES))
        if self._ring is None:
            self._fail(session, ShareError(f"nothing can be staged in host memory: {self._problem}"))
        return self._ring is not None

    def _connect_outlet(self, session: Session, outlet: Outlet) -> None:
        outlet.connect(LinkLane(self._links, session, self._ring, sends=True))

    def _connect_inlet(self, session: Session, inlet: Inlet) -> None:
        inlet.connect(LinkLane(self._links, session, self._ring, sends=False))
