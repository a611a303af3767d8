"""The NCCL carrier: from GPU to GPU, over NVLink or the network, by communicators of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvferry.cuda.device import ordinal_of
from kvferry.errors import KVFerryError, ProtocolError, TransferError
from kvferry.p2p.carriers.base import Carrier, CarrierEvents
from kvferry.p2p.carriers.nccl.inlet import Expected, Inlet
from kvferry.p2p.carriers.nccl.outlet import Outlet, Piece, Post
from kvferry.p2p.carriers.nccl.ring import Part, Ring
from kvferry.p2p.carriers.nccl.slots import Slots
from kvferry.p2p.memory import BlockMemory, FlatMemory, Memory
from kvferry.p2p.nccl import Communicator, NcclLauncher, NCCLLibrary, NcclSettings
from kvferry.p2p.signal.handshake import NCCL_CARRIER
from kvferry.p2p.signal.messages import Message, NcclGo, NcclNew, NcclPush, Offer, Ready
from kvferry.p2p.signal.session import Session

SLOT_BYTES = 32 << 20
SLOTS = 4  # for each direction

Tell = Callable[[Session, Message], None]
_E = TypeVar("_E", Outlet, Inlet)


class NcclCarrier:
    """All but `prepare` and `close` is called in the loop's thread; tensors, which lie in host memory, go by the link.

    Each direction of a session has a communicator of its own, made by its sender when it first has something to send.
    Neither side launches before the source's bytes are in a slot, the receiver has one free, and both have agreed: so
    nothing that is launched waits for anything but its other half, which is launched, too.
    """

    name = NCCL_CARRIER

    def __init__(self, host: Carrier, events: CarrierEvents, tell: Tell, post: Post, settings: NcclSettings) -> None:
        self._host = host
        self._events = events
        self._tell = tell
        self._post = post
        self._settings = settings
        self._library: NCCLLibrary | None = None
        self._launcher: NcclLauncher | None = None
        self._ring: Ring | None = None
        self._send_slots = Slots(())
        self._receive_slots = Slots(())
        self._outlets: dict[Session, Outlet] = {}
        self._inlets: dict[Session, Inlet] = {}
        self._by_number: dict[int, Outlet] = {}

    @property
    def bytes_per_peer(self) -> int:
        """GPU memory that each direction of a session takes."""
        return self._settings.bytes_per_peer

    def prepare(self, device_uuid: str, *, slot_bytes: int = SLOT_BYTES) -> None:
        """Load NCCL and allocate the ring, once. Raises NcclError, CudaError where that cannot be."""
        if self._ring is not None:
            if self._ring.device != ordinal_of(device_uuid):
                raise ProtocolError(f"NCCL was made ready for another GPU than {device_uuid}: use another engine")
            return
        device = ordinal_of(device_uuid)
        self._library = NCCLLibrary()
        launcher = NcclLauncher(self._library, device, self._settings)
        try:
            self._ring = Ring(device, slots=2 * SLOTS, slot_bytes=slot_bytes)
        except BaseException:
            launcher.close()
            raise
        self._launcher = launcher
        self._send_slots = Slots(self._ring.addresses[:SLOTS])
        self._receive_slots = Slots(self._ring.addresses[SLOTS:])

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        """Queue it, in parts of a slot each."""
        if isinstance(source, FlatMemory):
            self._host.start_item(session, number, item, source)
            return
        assert self._ring is not None
        outlet = self._outlets.get(session) or self._open_outlet(session, self._ring)
        self._by_number[number] = outlet
        total = session.layer_bytes()[item] * len(source.ids)
        for begin in range(0, total, self._ring.slot_bytes):
            part = Part(source, item, session.pieces(item), begin, min(begin + self._ring.slot_bytes, total))
            outlet.queue.append(Piece(number, item, part))
        outlet.pump()

    def stop_source(self, session: Session, number: int) -> None:
        """Gathers that run are waited for."""
        outlet = self._by_number.pop(number, None)
        if outlet is None:
            self._host.stop_source(session, number)
        else:
            outlet.stop(number)

    def peer_stopped(self, session: Session, number: int) -> None:
        """Nothing: the peer does not read the source."""

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        """Let what is pushed of a transfer land."""
        if isinstance(destination, BlockMemory):
            expected = Expected(destination, session.pieces, offer.item_bytes)
            self._inlet(session).expected[offer.number] = expected
        else:
            self._host.expect(session, offer, destination)

    def ready(self, session: Session, message: Ready) -> None:
        """Nothing: what is ready is pushed."""

    def stop_landing(self, session: Session, number: int) -> None:
        """Scatters that run are waited for."""
        inlet = self._inlets.get(session)
        if inlet is not None and (number in inlet.expected or number in inlet.writing):
            inlet.stop(number)
        else:
            self._host.stop_landing(session, number)

    def heard(self, session: Session, message: NcclNew | NcclPush | NcclGo) -> bool:
        """A message of this carrier's own; False where it was not to be expected, which ends the session."""
        try:
            if isinstance(message, NcclNew):
                self._join(session, message)
            elif isinstance(message, NcclPush):
                self._inlet(session).push(message)
            elif not (outlet := self._outlets.get(session)) or not outlet.go():
                raise ProtocolError("a go for nothing that was pushed")
        except KVFerryError as error:
            self._fail(session, error)
            return False
        return True

    def session_lost(self, session: Session) -> None:
        """NCCL does not notice that a peer has died: its communicators are aborted, in the launcher's thread."""
        for end in (self._outlets.pop(session, None), self._inlets.get(session)):
            if end is not None:
                end.end(f"{session!r} has ended")
        for lost in [lost for lost, inlet in self._inlets.items() if inlet.ended and not inlet.writing]:
            del self._inlets[lost]  # the others still write into somebody's blocks

    def close(self) -> None:
        """End the communicators and the ring. Idempotent; waits, but not without end."""
        launcher, self._launcher = self._launcher, None
        ring, self._ring = self._ring, None
        if launcher is not None:
            launcher.close()
        if ring is not None:
            ring.close()

    def _open_outlet(self, session: Session, ring: Ring) -> Outlet:
        assert self._library is not None
        outlet = Outlet(
            ring,
            self._send_slots,
            partial(self._tell, session),
            self._post,
            self._events.released,
            partial(self._fail, session),
        )
        self._outlets[session] = outlet
        try:
            unique_id = bytes(self._library.ncclGetUniqueId())
            self._tell(session, NcclNew(unique_id=unique_id, max_ctas=self._settings.max_ctas))
            self._connect(session, outlet, unique_id, 0)
        except KVFerryError as error:
            self._fail(session, error)
        return outlet

    def _join(self, session: Session, message: NcclNew) -> None:
        inlet = self._inlet(session)
        if message.max_ctas != self._settings.max_ctas:
            raise ProtocolError(f"{message.max_ctas} NCCL channels there, {self._settings.max_ctas} here: set the same")
        if inlet.comm is not None:
            raise ProtocolError("a second communicator for one direction")
        self._connect(session, inlet, message.unique_id, 1)

    def _connect(self, session: Session, end: _E, unique_id: bytes, rank: int) -> None:
        assert self._launcher is not None
        assert session.about is not None
        uuid = session.about.device_uuid
        future = self._launcher.connect(unique_id, rank, peer_device_uuid=uuid, name=repr(session))
        future.add_done_callback(lambda done: self._post(partial(self._connected, session, end, done)))

    def _connected(self, session: Session, end: _E, done: Future[Communicator]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(session, error if isinstance(error, Exception) else TransferError("failed", repr(error)))
        elif end.ended:
            done.result().abort("the session has ended meanwhile")
        else:
            end.comm = done.result()
            end.pump()

    def _inlet(self, session: Session) -> Inlet:
        assert self._ring is not None
        inlet = self._inlets.get(session)
        if inlet is None:
            inlet = self._inlets[session] = Inlet(
                self._ring,
                self._receive_slots,
                partial(self._tell, session),
                self._post,
                partial(self._events.item_landed, session),
                partial(self._events.landing_stopped, session),
                partial(self._fail, session),
            )
        return inlet

    def _fail(self, session: Session, error: Exception) -> None:
        """The session ends, and with it all transfers over it; the next one begins anew."""
        text = f"{session!r}: {error}"[:2000]
        self._events.carrier_failed(session, TransferError("nccl", text))
