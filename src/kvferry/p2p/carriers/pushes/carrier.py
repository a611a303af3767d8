"""What every carrier does that moves all in runs through slots, whatever exchanges them with the peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvferry.errors import KVFerryError, ProtocolError, TransferError
from kvferry.p2p import geometry
from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.carriers.pushes.buffers import Buffer, Buffers
from kvferry.p2p.carriers.pushes.inlet import Expected, Inlet
from kvferry.p2p.carriers.pushes.outlet import GO_S, Item, Outlet, Post
from kvferry.p2p.memory import BlockMemory, Memory
from kvferry.p2p.signal.messages import Go, Message, NcclNew, Offer, Push, Ready
from kvferry.p2p.signal.session import Session

_NO_BYTES = 1 << 16  # in parts of any size

Tell = Callable[[Session, Message], None]


class PushCarrier:
    """All but `close` is called in the loop's thread. The sender pushes, so nobody but it reads the source."""

    name = ""
    error_code = "failed"

    def __init__(self, events: CarrierEvents, tell: Tell, post: Post) -> None:
        """`tell` sends a message over a session; `post` has the loop's thread call something."""
        self._events = events
        self._tell = tell
        self._post = post
        self._send_buffers = Buffers(())
        self._receive_buffers = Buffers(())
        self._outlets: dict[Session, Outlet] = {}
        self._inlets: dict[Session, Inlet] = {}
        self._by_number: dict[int, Outlet] = {}

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        """Queue it."""
        outlet = self._outlet(session)
        if outlet is None or outlet.ended:
            return
        self._by_number[number] = outlet
        total = _bytes_of(session, source, item)
        if not total:
            self._tell(session, Push(number=number, item=item, items=1, nbytes=0, part_bytes=_NO_BYTES))
            return
        if not outlet.queue:  # once all that is ready by now is in the queue, as what follows each other goes together
            self._post(outlet.pump)
        outlet.queue.append(Item(number, item, source, _pieces_of(session, source, item), total))

    def start_early(self, session: Session, number: int, items: Sequence[int], source: Memory) -> Sequence[int]:
        """Nothing: the peer does not read the source."""
        return ()

    def stop_source(self, session: Session, number: int) -> None:
        """What the peer has been told of is read to its end first."""
        outlet = self._by_number.pop(number, None)
        if outlet is None:
            self._events.released(number)
        else:
            outlet.stop(number)

    def peer_stopped(self, session: Session, number: int) -> None:
        """Nothing: the peer does not read the source."""

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        """Let what is pushed of a transfer land."""
        inlet = self._inlet(session)
        if inlet is not None:
            pieces = partial(_pieces_of, session, destination)
            inlet.expected[offer.number] = Expected(destination, pieces, offer.item_bytes)

    def ready(self, session: Session, message: Ready) -> None:
        """Nothing: what is ready is pushed."""

    def stop_landing(self, session: Session, number: int) -> None:
        """What is being written is waited for."""
        inlet = self._inlets.get(session)
        if inlet is None:
            self._events.landing_stopped(session, number)
        else:
            inlet.stop(number)

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        """A message of this carrier's own; False where it was not to be expected, which ends the session."""
        try:
            if isinstance(message, Push):
                inlet = self._inlet(session)
                if inlet is not None:
                    inlet.push(message)
            elif not isinstance(message, Go):
                raise ProtocolError("a communicator of NCCL where there is none")
            elif (outlet := self._outlets.get(session)) is None:
                raise ProtocolError("a go where nothing was pushed")
            else:
                outlet.go(message)
        except KVFerryError as error:
            self._fail(session, error)
            return False
        return True

    def tick(self, now: float) -> None:
        """A peer that begins nothing of what was pushed would keep a buffer, and somebody's blocks, for ever."""
        for session, outlet in self._outlets.items():
            if outlet.is_late(now):
                self._fail(session, TransferError("timed_out", f"what was pushed was not begun within {GO_S:g} s"))

    def session_lost(self, session: Session) -> None:
        """Exchange nothing more over it; what is being read or written is waited for."""
        for end in (self._outlets.pop(session, None), self._inlets.get(session)):
            if end is not None:
                end.end(f"{session!r} has ended")
        for lost in [lost for lost, inlet in self._inlets.items() if inlet.ended and inlet.is_idle]:
            del self._inlets[lost]  # the others still write into somebody's blocks

    def close(self) -> None:
        """End all. Idempotent; waits, but not without end."""
        raise NotImplementedError

    def _connect_outlet(self, session: Session, outlet: Outlet) -> None:
        """Give it the lane that it sends over, now or later. Raises KVFerryError."""
        raise NotImplementedError

    def _connect_inlet(self, session: Session, inlet: Inlet) -> None:
        """The same for what comes."""
        raise NotImplementedError

    def _use(self, buffers: Sequence[Buffer]) -> None:
        """Half of them are for each direction."""
        half = len(buffers) // 2
        self._send_buffers, self._receive_buffers = Buffers(buffers[:half]), Buffers(buffers[half:])

    def _is_ready(self, session: Session) -> bool:
        """Whether there are buffers. Where there are none the session ends."""
        raise NotImplementedError

    def _outlet(self, session: Session) -> Outlet | None:
        outlet = self._outlets.get(session)
        if outlet is None and not session.ended and self._is_ready(session):
            outlet = self._outlets[session] = Outlet(
                self._send_buffers,
                partial(self._tell, session),
                self._post,
                self._events.released,
                partial(self._fail, session),
            )
            try:
                self._connect_outlet(session, outlet)
            except KVFerryError as error:
                self._fail(session, error)
        return outlet

    def _inlet(self, session: Session) -> Inlet | None:
        inlet = self._inlets.get(session)
        if inlet is None and not session.ended and self._is_ready(session):
            inlet = self._inlets[session] = Inlet(
                self._receive_buffers,
                partial(self._tell, session),
                self._post,
                partial(self._events.item_landed, session),
                partial(self._events.landing_stopped, session),
                partial(self._fail, session),
            )
            self._connect_inlet(session, inlet)
        return inlet

    def _fail(self, session: Session, error: Exception) -> None:
        """The session ends, and with it all transfers over it; the next one begins anew."""
        text = f"{session!r}: {error}"[:2000]
        self._events.carrier_failed(session, TransferError(self.error_code, text))


def _bytes_of(session: Session, memory: Memory, item: int) -> int:
    if isinstance(memory, BlockMemory):
        return session.layer_bytes()[item] * len(memory.ids)
    return memory.items[item][1]


def _pieces_of(session: Session, memory: Memory, item: int) -> tuple[geometry.Piece, ...]:
    """Which bytes of a layer's blocks go over the session; flat memory goes whole."""
    return session.pieces(item) if isinstance(memory, BlockMemory) else ()
