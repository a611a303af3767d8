"""The one-sided carrier: the receiver copies each layer from the sender's blocks straight into its own.

Blocks of a claimed transfer are in one place only, the sender's, until they are in the receiver's. Tensors, which lie
in memory that is not shared, go by the host carrier, over the session's link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.copy.pair_copiers import CudaPairCopier, HostPairCopier
from kvferry.copy.plan import check_ids
from kvferry.errors import BlockIdError, PeerGoneError, TransferError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.base import Carrier, CarrierEvents
from kvferry.p2p.carriers.ipc.caches import Exported
from kvferry.p2p.carriers.ipc.doors import Doors, Settled
from kvferry.p2p.carriers.ipc.reader import Job, Reader
from kvferry.p2p.carriers.runs import Int64s
from kvferry.p2p.memory import FlatMemory, Memory
from kvferry.p2p.signal.handshake import IPC_CARRIER
from kvferry.p2p.signal.messages import BLOCK_ID_BYTES, About, Go, Message, NcclNew, Offer, Push, Ready
from kvferry.p2p.signal.session import Session

_LOG = logging.getLogger(__name__)
_CLOSE_S = 5.0
_POLL_S = 0.002

Post = Callable[[Callable[[], None]], None]
Tell = Callable[[Session, Message], None]


@dataclass(slots=True, eq=False)
class _Reading:
    """A transfer of this engine that a peer reads; `stopping`: `released` is waited for."""

    session: Session
    stopping: bool = False


class IpcCarrier:
    """All but `export` and `close` is called in the loop's thread. It copies in the thread of `Reader`.

    A transfer's source is released when the peer says of it, or of the session, that it reads no more, or when the
    peer's process has ended; never because time has passed.
    """

    name = IPC_CARRIER

    def __init__(self, host: Carrier, events: CarrierEvents, tell: Tell, post: Post) -> None:
        """`tell` sends a message over a session; `post` has the loop's thread call something."""
        self._host = host
        self._events = events
        self._tell = tell
        self._post = post
        self._reader = Reader(events)
        self._doors = Doors(self)
        self._reading: dict[int, _Reading] = {}
        self._ready: dict[int, list[int]] = {}  # what is about to be told, for many layers at once
        self._read_out: set[Session] = set()  # those that have ended, and over which this engine reads no more
        self._lock = threading.Lock()  # guards the two flags
        self._started = False
        self._closed = False

    @property
    def path(self) -> str:
        """The name of the socket where peers come."""
        return self._doors.path

    @property
    def num_expired(self) -> int:
        """Copies that were not begun because their lease was over."""
        return self._reader.num_expired

    def start(self) -> None:
        """Let peers come, though nothing may be exported yet. Idempotent."""
        with self._lock:
            begin = not (self._started or self._closed)
            self._started = True
        if begin:
            self._reader.start()
            self._doors.start()

    def export(self, caches: KVCaches) -> Exported:
        """Let peers map these, instead of those before, and get ready to copy into them. In the caller's thread.

        Raises ShareError where no other process can map them, CudaError where the device cannot be used.
        """
        exported = Exported.of(caches)
        try:
            device = exported.device
            copier = HostPairCopier() if device is None else CudaPairCopier(device)
        except BaseException:
            exported.close()
            raise
        self.start()
        self._reader.use(copier)
        before, self._doors.own = self._doors.own, exported
        before.close()
        return exported

    # The handshake

    def await_peer(self, session: Session, ticket: bytes) -> None:
        """The acceptor of a session may come to map this engine's KV caches."""
        self._doors.await_visitor(session, ticket)

    def map_peer(self, session: Session, ticket: bytes, then: Settled) -> None:
        """Map the caches of a session's initiator, and let it map this engine's.

        `then` is called in the loop's thread, with why that failed, or "".
        """
        self._doors.visit(session, ticket, lambda problem: self._post(partial(then, problem)))

    def has_mapped(self, session: Session, about: About) -> bool:
        """Whether both have mapped the other's caches, and that the peer is the one that this is said of."""
        caches = self._doors.caches_of(session)
        return caches is not None and caches.about == about

    def forget(self, session: Session) -> None:
        """The session uses another carrier, or has ended before it was up."""
        self._doors.forget(session)

    # The sender's side

    def start_item(self, session: Session, number: int, item: int, source: Memory) -> None:
        """Tell the peer that it may read it."""
        if isinstance(source, FlatMemory):
            self._host.start_item(session, number, item, source)
            return
        if self._doors.reads(session):
            self._reading.setdefault(number, _Reading(session))
        if number not in self._ready:
            self._ready[number] = []
            self._post(partial(self._tell_ready, session, number))
        self._ready[number].append(item)

    def start_early(self, session: Session, number: int, items: Sequence[int], source: Memory) -> Sequence[int]:
        """All of them: two messages less are waited for before the copy begins."""
        if not items or isinstance(source, FlatMemory) or not self._doors.reads(session):
            return ()
        self._reading.setdefault(number, _Reading(session))
        return items

    def stop_source(self, session: Session, number: int) -> None:
        """Answered when the peer has stopped."""
        reading = self._reading.get(number)
        if reading is None:
            self._host.stop_source(session, number)
        else:
            reading.stopping = True

    def peer_stopped(self, session: Session, number: int) -> None:
        """It reads this transfer no more."""
        reading = self._reading.get(number)
        if reading is not None and reading.session == session:
            self._stopped(number)

    # The receiver's side

    def expect(self, session: Session, offer: Offer, destination: Memory) -> None:
        """Get ready to read it. A peer whose block ids are not in its own cache loses its session."""
        if offer.tensor is not None:
            self._host.expect(session, offer, destination)
            return
        caches = self._doors.caches_of(session)
        from_ids = None if caches is None else _ids_of(offer, caches.num_blocks)
        if caches is None or from_ids is None:
            error = TransferError("malformed", f"{offer.num_blocks} blocks whose ids are not those of the peer's cache")
            self._events.carrier_failed(session, error)
            return
        job = Job(
            session,
            offer.number,
            lambda items: caches.pairs(session, items, destination, from_ids),
            same_gpu=caches.same_gpu,
            until=time.monotonic() + offer.lease_s,
            to_come=set(range(len(offer.item_bytes))),
        )
        self._reader.add(job)

    def ready(self, session: Session, message: Ready) -> None:
        """Read them, after what became ready before."""
        self._reader.ready(session, message.number, message.items)

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        """About tensors, which go by the host carrier."""
        return self._host.heard(session, message)

    def stop_landing(self, session: Session, number: int) -> None:
        """Answered when no copy of it is under way."""
        self._reader.stop(session, number, lambda: self._post(partial(self._host.stop_landing, session, number)))

    def tick(self, now: float) -> None:
        """Nothing: a peer that reads and is silent keeps the blocks."""

    def session_lost(self, session: Session) -> None:
        """Unmap the peer's caches once no copy runs. The peer may read on until it says that it does not."""
        self._host.session_lost(session)
        self._reader.drop(session, lambda: self._read_no_more(session))

    def close(self) -> None:
        """Wait a while for the peers that still read, whose sessions have ended. Idempotent."""
        with self._lock:
            self._closed = True
        self._reader.close()
        deadline = time.monotonic() + _CLOSE_S
        sessions = {reading.session for reading in self._reading.values()}
        while any(self._doors.reads(session) for session in sessions) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for session in sessions:
            if self._doors.reads(session):
                _LOG.error("%r has not said that it reads no more, and lives: its blocks are not safe to use", session)
        self._doors.close()
        self._doors.own.close()

    # What the doors tell, in their thread

    def peer_left(self, session: Session) -> None:
        self._post(partial(self._on_peer_left, session))

    def peer_reads_no_more(self, session: Session) -> None:
        self._post(partial(self._on_peer_reads_no_more, session))

    def _on_peer_left(self, session: Session) -> None:
        if session.carrier == self.name:
            error = PeerGoneError("peer_gone", f"{session!r}: the other engine has ended")
            self._events.carrier_failed(session, error)
        else:
            self._doors.forget(session)  # it did not work out for the other one

    def _on_peer_reads_no_more(self, session: Session) -> None:
        for number in [number for number, reading in self._reading.items() if reading.session == session]:
            self._stopped(number)

    def _tell_ready(self, session: Session, number: int) -> None:
        self._tell(session, Ready(number=number, items=tuple(self._ready.pop(number))))

    def _stopped(self, number: int) -> None:
        reading = self._reading.pop(number)
        if reading.stopping:
            self._events.released(number)
        self._settle(reading.session)

    def _read_no_more(self, session: Session) -> None:
        """In the copying thread."""
        self._doors.say_done(session)
        self._post(partial(self._on_read_no_more, session))

    def _on_read_no_more(self, session: Session) -> None:
        self._read_out.add(session)
        self._settle(session)

    def _settle(self, session: Session) -> None:
        """Hang up where the session has ended and neither side reads any more."""
        if session in self._read_out and not any(reading.session == session for reading in self._reading.values()):
            self._read_out.discard(session)
            self._doors.forget(session)


def _ids_of(offer: Offer, num_blocks: int) -> Int64s | None:
    """The sender's blocks; None where they are not as many as offered, or not different ones of a cache of so many."""
    if len(offer.block_ids) != BLOCK_ID_BYTES * offer.num_blocks:
        return None
    ids = np.frombuffer(offer.block_ids, dtype="<i4").astype(np.int64)
    try:
        check_ids(ids, num_blocks)
    except BlockIdError:
        return None
    return ids
