"""A sender and a receiver without sockets: messages and carriers that move when they are told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.errors import PeerGoneError, TransferError
from kvferry.p2p.signal.messages import (
    Accept,
    Ask,
    End,
    Landed,
    Message,
    NoSuch,
    Offer,
    Ready,
    Reject,
    Stopped,
    Withdraw,
)
from kvferry.p2p.transfers.incoming import IncomingTable
from kvferry.p2p.transfers.incoming_records import Claim, InKey
from kvferry.p2p.transfers.outgoing import OutgoingTable
from kvferry.p2p.transfers.outgoing_records import Outgoing, OutKey

ROOM = 100
LEASE_S = 10.0
ITEMS = 3
BLOCKS = 4


@dataclass(eq=False)
class Sent:
    """A transfer as its caller sees it."""

    number: int
    transfer_id: str
    outcomes: list[TransferError | None] = field(default_factory=list)


@dataclass(eq=False)
class Wanted:
    """A claim as its caller sees it.

    `content` is what has been written into its own memory, by item: number of the transfer, and its first block there.
    """

    key: InKey
    own_memory: bool
    skip_blocks: int = 0
    outcomes: list[TransferError | None] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)
    content: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Room:
    """What is lent of the buffer."""

    session: int
    nbytes: int
    content: dict[int, tuple[int, int]] = field(default_factory=dict)


class World:
    """Both sides, one session at a time. Nothing happens by itself."""

    reads = False  # whether it is the receiver that reads the source

    def __init__(self) -> None:
        self.now = 0.0
        self.session = 1
        self.to_receiver: deque[tuple[int, Message]] = deque()
        self.to_sender: deque[tuple[int, Message]] = deque()
        self.flying: list[tuple[int, int, int]] = []  # session, number, item: what the carrier reads
        self.sender_stops: list[int] = []
        self.receiver_stops: list[tuple[int, int]] = []
        self.reading: dict[int, int] = {}  # by number: the session over which the receiver may read it
        self.stopping: set[int] = set()  # of these, those that are to be released
        self.landing: dict[tuple[int, int], Any] = {}
        self.copies: list[tuple[InKey, Room, Wanted, int]] = []
        self.skipped: dict[int, int] = {}  # by number: blocks that the sender leaves out
        self.reserved: list[Room] = []
        self.sent: dict[int, Sent] = {}
        self.wanted: list[Wanted] = []
        self.out = OutgoingTable(_Sender(self), remember_s=LEASE_S)
        self.into = IncomingTable(_Receiver(self), remember_s=LEASE_S)

    # What callers do

    def send(self, transfer_id: str, nbytes: int, *, keep: bool, ready: bool) -> Sent:
        sent = Sent(len(self.sent) + 1, transfer_id)
        offer = Offer(
            number=sent.number,
            transfer_id=transfer_id,
            part=0,
            item_bytes=(nbytes,) * ITEMS,
            lease_s=0,
            num_blocks=BLOCKS,
        )
        out = Outgoing(
            OutKey(transfer_id, 0 if keep else "there"),
            sent.number,
            offer,
            self.now + LEASE_S,
            sent.outcomes.append,
            set(range(ITEMS)) if ready else set(),
        )
        try:
            self.out.add(out, None if keep else self.session, self.now)
        except TransferError as error:
            sent.outcomes.append(error)
        self.sent[sent.number] = sent
        return sent

    def claim(self, transfer_id: str, *, own_memory: bool, wait_s: float, ask: bool, skip_blocks: int = 0) -> Wanted:
        wanted = Wanted(InKey(transfer_id, 0), own_memory, skip_blocks)

        def deliver(place: Any, error: TransferError | None) -> None:
            wanted.outcomes.append(error)
            wanted.places.append(place)

        memory = wanted if own_memory else None
        claim = Claim(wanted.key, self.now + wait_s, lambda _: None, deliver, memory, skip_blocks)
        try:
            self.into.claim(claim, self.now)
            if ask:
                claim.source = self.session
                self.tell_sender(self.session, Ask(transfer_id=transfer_id, part=0, wait_s=wait_s))
        except TransferError as error:
            wanted.outcomes.append(error)
        self.wanted.append(wanted)
        return wanted

    def withdraw(self, transfer_id: str) -> None:
        """Also who may wait for it at the receiver's is told."""
        self.out.withdraw(transfer_id, self.now)
        self.tell_receiver(self.session, Withdraw(transfer_id=transfer_id, part=0))

    def give_back(self, room: Room) -> None:
        self.reserved.remove(room)
        self.into.fill_room(self.now)

    # What the world does

    def tell_sender(self, session: int, message: Message) -> None:
        if session == self.session:
            self.to_sender.append(
                (session, msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))
            )

    def tell_receiver(self, session: int, message: Message) -> None:
        if session == self.session:
            self.to_receiver.append((session, message))

    def hear_sender(self) -> None:
        """The receiver gets a message."""
        session, message = self.to_receiver.popleft()
        match message:
            case Offer():
                self.into.offered(session, message, self.now)
            case Ready():
                if not self.into.ready(session, message) and (session, message.number) in self.landing:
                    self.flying += [(session, message.number, item) for item in message.items]
            case End():
                self.into.ended(session, message, self.now)
            case NoSuch():
                self.into.no_such(session, message)
            case Withdraw():
                self.into.withdrawn(message, self.now)
            case _:
                raise AssertionError(message)

    def hear_receiver(self) -> None:
        """The sender gets a message."""
        session, message = self.to_sender.popleft()
        match message:
            case Accept():
                self.out.accepted(session, message)
            case Landed():
                self.out.landed(session, message)
            case Stopped():
                self.out.stopped(session, message)
            case Ask():
                self.out.asked(session, message, self.now)
            case Reject():
                self.out.rejected(session, message, self.now)
            case _:
                raise AssertionError(message)

    def land(self, index: int) -> None:
        """One item of those that the carrier has arrives."""
        session, number, item = self.flying.pop(index % len(self.flying))
        destination = self.landing.get((session, number))
        if destination is not None:
            wanted_from = destination.skip_blocks if isinstance(destination, Wanted) else 0
            destination.content[item] = number, wanted_from if self.reads else self.skipped.get(number, 0)
            if len(destination.content) == ITEMS:
                del self.landing[session, number]
            self.into.item_landed(session, number, [item], self.now)

    def stop_sender(self) -> None:
        number = self.sender_stops.pop(0)
        self.flying = [flight for flight in self.flying if flight[1] != number]
        self.out.released(number)

    def stop_receiver(self) -> None:
        session, number = self.receiver_stops.pop(0)
        self.landing.pop((session, number), None)
        if self.reads:
            self.flying = [flight for flight in self.flying if flight[:2] != (session, number)]
        self.into.landing_stopped(session, number, self.now)

    def copy(self) -> None:
        key, room, wanted, skip_blocks = self.copies.pop(0)
        assert room in self.reserved
        wanted.content.update({item: (number, skip_blocks) for item, (number, _) in room.content.items()})
        self.into.copied(key, None)

    def lose_session(self) -> None:
        """All messages on their way are lost, and another session comes in its place; the carriers may be late."""
        lost, self.session = self.session, self.session + 1
        self.to_receiver.clear()
        self.to_sender.clear()
        self.out.session_lost(lost, PeerGoneError("peer_gone", "gone"))
        self.into.session_lost(lost, PeerGoneError("peer_gone", "gone"), self.now)

    def read_no_more(self) -> None:
        """The receiver has ended with all that it read over the sessions that there were before."""
        self.flying = [flight for flight in self.flying if flight[0] == self.session]
        for number in [number for number, session in self.reading.items() if session != self.session]:
            self.peer_stopped(number)

    def peer_stopped(self, number: int) -> None:
        self.reading.pop(number, None)
        if number in self.stopping:
            self.stopping.discard(number)
            self.sender_stops.append(number)

    def of_this_session(self) -> list[Outgoing]:
        """What has been offered over the session that there is."""
        return [out for out in self.out._by_number.values() if out.session == self.session]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.out.tick(self.now)
        self.into.tick(self.now)

    def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(10_000):
            if self.to_receiver:
                self.hear_sender()
            elif self.to_sender:
                self.hear_receiver()
            elif self.flying:
                self.land(0)
            elif self.sender_stops:
                self.stop_sender()
            elif self.receiver_stops:
                self.stop_receiver()
            elif self.copies:
                self.copy()
            elif set(self.reading.values()) - {self.session}:
                self.read_no_more()
            else:
                return
        raise AssertionError("it never ends")


class ReadingWorld(World):
    """The receiver reads the source by itself; it is released when the receiver says so, or has ended."""

    reads = True


class _Sender:
    def __init__(self, world: World) -> None:
        self._world = world

    def fitted(self, session: Any, offer: Offer) -> Offer:
        return offer

    def tell(self, session: Any, message: Message) -> None:
        self._world.tell_receiver(session, message)

    def skip_blocks(self, number: int, skip_blocks: int) -> None:
        if not self._world.reads:
            assert not any(flight[1] == number for flight in self._world.flying)
        self._world.skipped[number] = skip_blocks

    def start_item(self, session: Any, number: int, item: int) -> None:
        assert not self._world.sent[number].outcomes
        if self._world.reads:
            self._world.reading[number] = session
            self.tell(session, Ready(number=number, items=(item,)))
        elif session == self._world.session:
            self._world.flying.append((session, number, item))

    def start_early(self, session: Any, number: int, items: Sequence[int]) -> Sequence[int]:
        if not (self._world.reads and items):
            return ()
        self._world.reading[number] = session
        return items

    def stop_source(self, session: Any, number: int) -> None:
        if number in self._world.reading:
            self._world.stopping.add(number)
        else:
            self._world.sender_stops.append(number)

    def peer_stopped(self, session: Any, number: int) -> None:
        self._world.peer_stopped(number)


class _Receiver:
    def __init__(self, world: World) -> None:
        self._world = world

    def tell(self, session: Any, message: Message) -> None:
        self._world.tell_sender(session, message)

    def unfit(self, session: Any, offer: Offer) -> TransferError | None:
        return None

    def too_large(self, offer: Offer) -> TransferError | None:
        return TransferError("too_large", "!") if sum(offer.item_bytes) > ROOM else None

    def reserve(self, session: Any, offer: Offer) -> Room | None:
        nbytes = sum(offer.item_bytes)
        if sum(room.nbytes for room in self._world.reserved) + nbytes > ROOM:
            return None
        self._world.reserved.append(Room(session, nbytes))
        return self._world.reserved[-1]

    def release(self, place: Any) -> None:
        if place is not None:
            self._world.reserved.remove(place)

    def held(self, session: Any) -> int:
        return sum(room.nbytes for room in self._world.reserved if room.session == session)

    def expect(self, session: Any, offer: Offer, destination: Any) -> None:
        sent = BLOCKS - (destination.skip_blocks if isinstance(destination, Wanted) else 0)
        assert offer.num_blocks == sent
        if session == self._world.session:
            self._world.landing[session, offer.number] = destination
            self._world.flying += [(session, offer.number, item) for item in offer.ready]

    def stop_landing(self, session: Any, number: int) -> None:
        self._world.receiver_stops.append((session, number))

    def copy(self, key: InKey, place: Any, destination: Any, skip_blocks: int) -> None:
        self._world.copies.append((key, place, destination, skip_blocks))
