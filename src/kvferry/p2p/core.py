"""What joins signalling, transfers, carriers and the receive buffer, in the loop's thread."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvferry.errors import TransferError
from kvferry.p2p.awaited import AwaitedEvents
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.base import Carrier
from kvferry.p2p.fitting import fitted, unfit
from kvferry.p2p.memory import BlockMemory, FlatMemory, Memory
from kvferry.p2p.receive.copies import Copies, copies_of
from kvferry.p2p.receive.store import Place, RecvStore
from kvferry.p2p.signal.messages import (
    Accept,
    AnyMessage,
    Ask,
    End,
    Go,
    Landed,
    Message,
    NcclNew,
    NoSuch,
    Offer,
    Push,
    Ready,
    Reject,
    Stopped,
    Withdraw,
)
from kvferry.p2p.signal.session import Session
from kvferry.p2p.signal.sessions import Sessions
from kvferry.p2p.streams import Event, Use, mark_in
from kvferry.p2p.transfers.incoming import IncomingTable
from kvferry.p2p.transfers.incoming_records import Claim, InKey
from kvferry.p2p.transfers.outgoing import OutgoingTable
from kvferry.p2p.transfers.outgoing_records import Outgoing

_LOG = logging.getLogger(__name__)


class Core:
    """For the loop's thread. It does for both tables what they want done, and hears what sessions and carriers tell.

    Callers' threads post `send`, `claim` and the like; `post` is how other threads' answers get here.
    """

    def __init__(
        self,
        sessions: Sessions,
        store: RecvStore,
        copies: Copies,
        post: Callable[[Callable[[], None]], None],
        *,
        lease_s: float,
    ) -> None:
        self.sessions = sessions
        self.store = store
        self.outgoing = OutgoingTable(self, remember_s=lease_s)
        self.incoming = IncomingTable(self, remember_s=lease_s)
        self.carriers: dict[str, Carrier] = {}
        self.caches: KVCaches | None = None
        self.counters: Counter[str] = Counter()
        self.not_offered = ""  # what keeps peers from being offered a better carrier
        self._copies = copies
        self._post = post
        self._sources: dict[int, Memory] = {}
        self._unsent: dict[Session, list[Ask | Reject | Withdraw]] = {}
        self._events = AwaitedEvents()
        self._room_freed = False

    # What callers post

    def send(self, out: Outgoing, source: Memory, address: str | None) -> None:
        """Offer it to an address, or keep it until it is asked for."""
        self._sources[out.number] = source
        done = out.done
        out.done = lambda error: self._sent(out, error, done)
        try:
            session = None if address is None else self.sessions.open(address)
            self.outgoing.add(out, session if session is not None and session.is_up else None, self._now)
        except TransferError as error:
            out.done(error)

    def claim(self, claim: Claim, address: str | None, *, ask: bool = True) -> None:
        """Wait for what comes under an id; who is at the address, if there is one, is asked, or sends by itself."""
        try:
            self.incoming.claim(claim, self._now)
        except TransferError as error:
            claim.deliver(None, error)
            return
        if address is not None:
            try:
                session = claim.source = self.sessions.open(address)
            except TransferError as error:
                self.incoming.unreachable(claim.key, error)
                return
            if not ask:
                return
            wait_s = min(max(0.0, claim.ends_at - self._now), 86_400.0)
            self._tell_when_up(session, Ask(transfer_id=claim.key.transfer_id, part=claim.key.part, wait_s=wait_s))

    def reject(self, transfer_id: str, parts: int, addresses: Iterable[str]) -> None:
        """Nobody will take what comes under an id in so many parts; who keeps it at the addresses is told."""
        for part in range(parts):
            error = TransferError("rejected", f"{transfer_id!r} is not wanted")
            self.incoming.cancel(InKey(transfer_id, part), error, self._now)
        self._tell_all(addresses, Reject(transfer_id=transfer_id, part=0))

    def withdraw(self, transfer_id: str, addresses: Iterable[str]) -> None:
        """Nothing will come under an id; who may wait for it at the addresses is told."""
        self.outgoing.withdraw(transfer_id, self._now)
        self._tell_all(addresses, Withdraw(transfer_id=transfer_id, part=0))

    def give_back(self, place: Place, use: Use) -> None:
        """A place that was lent is free again once the GPU is done with it."""
        self.when_done(mark_in(use.stream), partial(self.release, place))

    def cancel_sending(self, number: int) -> None:
        self.outgoing.cancel(number, self._now, TransferError("cancelled", "the sender gave it up"))

    def cancel_claim(self, key: InKey) -> None:
        self.incoming.cancel(key, TransferError("cancelled", "the receiver gave it up"), self._now)

    def items_ready(self, number: int, items: Iterable[int]) -> None:
        """The source bytes of some items are there."""
        self.outgoing.items_ready(number, items)

    def when_done(self, event: Event | None, call: Callable[[], None]) -> None:
        """Call it once the event is done; at once where there is none."""
        self._events.add(event, call, self._now)

    # What sessions tell

    def session_up(self, session: Session) -> None:
        _LOG.info("%r uses carrier %s", session, session.carrier)
        if session.address is not None:
            self.outgoing.connected(session.address, session, self._now)
        for message in self._unsent.pop(session, []):
            self._tell_when_up(session, message)

    def session_lost(self, session: Session, error: TransferError) -> None:
        _LOG.info("%r: %s", session, error)
        self._unsent.pop(session, None)
        if session.carrier:
            self.carriers[session.carrier].session_lost(session)
        if session.address is not None:
            self.outgoing.unreachable(session.address, error)
        self.outgoing.session_lost(session, error)
        self.incoming.session_lost(session, error, self._now)

    def heard(self, session: Session, message: AnyMessage) -> None:
        known: bool | None = True
        match message:
            case Offer():
                self.incoming.offered(session, message, self._now)
            case Accept():
                known = self.outgoing.accepted(session, message)
            case Ready():
                if not self.incoming.ready(session, message):
                    self.carriers[session.carrier].ready(session, message)
            case NcclNew() | Push() | Go():
                known = self.carriers[session.carrier].heard(session, message)
            case Landed():
                known = self.outgoing.landed(session, message)
            case Stopped():
                known = self.outgoing.stopped(session, message)
            case End():
                known = self.incoming.ended(session, message, self._now)
            case Ask():
                self.outgoing.asked(session, message, self._now)
            case NoSuch():
                self.incoming.no_such(session, message)
            case Reject():
                self.outgoing.rejected(session, message, self._now)
            case Withdraw():
                self.incoming.withdrawn(message, self._now)
        self.counters["stray"] += not known

    def tick(self, now: float) -> float:
        """Time-outs, and what was waited for; returns when to come again."""
        look_again_at = self._events.look(now)
        for carrier in self.carriers.values():
            carrier.tick(now)
        next_at = min(self.sessions.tick(), self.outgoing.tick(now), self.incoming.tick(now))
        if self._room_freed:
            self._room_freed = False
            self.incoming.fill_room(now)
        return min(next_at, look_again_at)

    # What carriers tell; each has been posted

    def source_released(self, number: int) -> None:
        self.outgoing.released(number)

    def item_landed(self, session: Session, number: int, *items: int) -> None:
        self.incoming.item_landed(session, number, items, self._now)

    def landing_stopped(self, session: Session, number: int) -> None:
        self.incoming.landing_stopped(session, number, self._now)

    # What the tables want done

    def fitted(self, session: Any, offer: Offer) -> Offer | TransferError:
        return fitted(session, offer, self._sources[offer.number])

    def skip_blocks(self, number: int, skip_blocks: int) -> None:
        source = self._sources[number]
        assert isinstance(source, BlockMemory)
        self._sources[number] = source.without(skip_blocks)

    def tell(self, session: Any, message: Message) -> None:
        self.sessions.send(session, message)

    def start_item(self, session: Any, number: int, item: int) -> None:
        self.carriers[session.carrier].start_item(session, number, item, self._sources[number])

    def start_early(self, session: Any, number: int, items: Sequence[int]) -> Sequence[int]:
        return self.carriers[session.carrier].start_early(session, number, items, self._sources[number])

    def stop_source(self, session: Any, number: int) -> None:
        self.carriers[session.carrier].stop_source(session, number)

    def peer_stopped(self, session: Any, number: int) -> None:
        self.carriers[session.carrier].peer_stopped(session, number)

    def unfit(self, session: Any, offer: Offer) -> TransferError | None:
        return unfit(session, offer, self.caches)

    def too_large(self, offer: Offer) -> TransferError | None:
        if offer.tensor is None or self.store.could_ever(offer):
            return None
        sizes = " and ".join(f"a {region.name} of {region.total_bytes}" for region in self.store.regions)
        text = f"{sum(offer.item_bytes)} bytes; the receiver has {sizes} bytes for them"
        return TransferError("too_large", f"{text}: raise its kv_buffer_size, or await it with out= before it is sent")

    def reserve(self, session: Any, offer: Offer) -> Place | None:
        if offer.tensor is None and session.own.device_uuid:
            return None  # blocks of a GPU stay at the sender until they are claimed: the buffer is host memory
        return self.store.reserve(session, offer)

    def release(self, place: Any) -> None:
        if place is not None:
            self.store.release(place)
            self._room_freed = True

    def held(self, session: Any) -> int:
        return self.store.held(session)

    def expect(self, session: Any, offer: Offer, destination: Any) -> None:
        memory = destination.memory if isinstance(destination, Place) else destination
        carrier = self.carriers[session.carrier]
        carrier.expect(session, offer, memory)
        if offer.ready:
            carrier.ready(session, Ready(number=offer.number, items=offer.ready))

    def stop_landing(self, session: Any, number: int) -> None:
        self.carriers[session.carrier].stop_landing(session, number)

    def copy(self, key: InKey, place: Any, destination: Any, skip_blocks: int) -> None:
        assert isinstance(destination, BlockMemory | FlatMemory)
        items = copies_of(place, destination, skip_blocks)
        self._copies.copy(items, lambda error: self._post(partial(self.incoming.copied, key, error)))

    @property
    def _now(self) -> float:
        return time.monotonic()

    def _sent(self, out: Outgoing, error: TransferError | None, done: Callable[[TransferError | None], None]) -> None:
        self._sources.pop(out.number, None)
        self.counters["sent" if error is None else f"not_sent_{error.code}"] += 1
        if error is not None:
            _LOG.warning("transfer %r was not sent: %s", out.key.transfer_id, error)
        done(error)

    def _tell_all(self, addresses: Iterable[str], message: Reject | Withdraw) -> None:
        for address in addresses:
            self._tell_when_up(self.sessions.open(address), message)

    def _tell_when_up(self, session: Session, message: Ask | Reject | Withdraw) -> None:
        """The peer knows this rank by its place among those that ask for a share of what it has."""
        if session.is_up:
            self.tell(session, msgspec.structs.replace(message, part=session.part_of_mine()))
        else:
            self._unsent.setdefault(session, []).append(message)
