"""Three engines that push to each other, without sockets, threads or a GPU: each thing happens when it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvferry.errors import TransferError
from kvferry.p2p.carriers.pushes.buffers import Buffer
from kvferry.p2p.carriers.pushes.carrier import PushCarrier
from kvferry.p2p.carriers.pushes.inlet import Inlet
from kvferry.p2p.carriers.pushes.outlet import Outlet
from kvferry.p2p.carriers.pushes.run import Part
from kvferry.p2p.memory import FlatMemory
from kvferry.p2p.signal.messages import Message, Offer
from p2p.push_doubles import Action, Lane, Slow, exchanged

ENGINES = 3
SLOTS = 3
SIZES = ((64, 16), (32, 16), (48, 8))  # of the slots of both buffers, of each engine


@dataclass(eq=False)
class Session:
    """Between two engines, by their numbers. One that is `stuck` says and exchanges nothing."""

    engines: tuple[int, int]
    is_up: bool = True
    is_stuck: bool = False
    is_broken: bool = False  # a copy of it has failed
    messages: dict[int, deque[Message]] = field(default_factory=lambda: {0: deque(), 1: deque(), 2: deque()})
    lanes: dict[tuple[int, bool], Lane] = field(default_factory=dict)  # by engine, and whether it sends
    unconnected: deque[Action] = field(default_factory=deque)

    @property
    def ended(self) -> bool:
        return not self.is_up

    def other(self, engine: int) -> int:
        return self.engines[0] + self.engines[1] - engine


@dataclass(eq=False)
class Transfer:
    """What the tables of both engines would know of it."""

    number: int
    session: Session
    sender: int
    source: list[np.ndarray[Any, Any]]
    target: list[np.ndarray[Any, Any]]
    started: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    source_told: bool = False  # to stop
    landing_told: bool = False
    released: bool = False
    stopped: bool = False

    @property
    def receiver(self) -> int:
        return self.session.other(self.sender)

    @property
    def has_landed(self) -> bool:
        return len(self.landed) == len(self.target)


class Engine(PushCarrier):
    """A carrier, and all that it tells."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.posts: deque[Action] = deque()
        super().__init__(self, self._say, self.posts.append)
        self._memory = [np.zeros(SLOTS * size, dtype=np.uint8) for size in SIZES[number] * 2]
        self.copies = [Slow(world.check_copy) for _ in self._memory]
        self._use(
            [
                Buffer(tuple(memory.ctypes.data + slot * size for slot in range(SLOTS)), size, copies)
                for size, memory, copies in zip(SIZES[number] * 2, self._memory, self.copies, strict=True)
            ]
        )

    def released(self, number: int) -> None:
        transfer = self.world.transfers[number]
        assert not transfer.released
        assert transfer.source_told
        assert not any(part.run.number == number and to_flat for part, _, _, to_flat in self.pending())
        transfer.released = True

    def landing_stopped(self, _session: Any, number: int) -> None:
        transfer = self.world.transfers[number]
        assert not transfer.stopped
        assert transfer.landing_told
        assert not any(part.run.number == number and not to_flat for part, _, _, to_flat in self.pending())
        transfer.stopped = True

    def item_landed(self, _session: Any, number: int, *items: int) -> None:
        transfer = self.world.transfers[number]
        assert not transfer.stopped
        for item in items:
            assert item not in transfer.landed
            assert (transfer.target[item] == transfer.source[item]).all()
            transfer.landed.add(item)

    def carrier_failed(self, session: Any, error: TransferError) -> None:
        assert session.is_broken or not session.is_up, error
        self.posts.append(partial(self.world.lose, session))

    def pending(self) -> Iterator[tuple[Part, int, Callable[[Exception | None], None], bool]]:
        for copies in self.copies:
            yield from copies.pending

    def hear(self, session: Session) -> None:
        message: Any = session.messages[self.number].popleft()
        assert self.heard(session, message)  # type: ignore[arg-type]

    def lose(self, session: Session) -> None:
        """What the loop does when a session has ended."""
        self.session_lost(session)  # type: ignore[arg-type]
        for transfer in self.world.transfers.values():
            if transfer.session is session:
                self.world.stop(transfer, source=transfer.sender == self.number)

    def close(self) -> None:
        """Nothing."""

    def _say(self, session: Any, message: Message) -> None:
        if session.is_up:
            session.messages[session.other(self.number)].append(message)

    def _is_ready(self, session: Any) -> bool:
        return True

    def _connect_outlet(self, session: Any, outlet: Outlet) -> None:
        self._connect(session, outlet, sends=True)

    def _connect_inlet(self, session: Any, inlet: Inlet) -> None:
        self._connect(session, inlet, sends=False)

    def _connect(self, session: Session, end: Outlet | Inlet, *, sends: bool) -> None:
        lane = session.lanes[self.number, sends] = Lane()
        session.unconnected.append(lambda: None if end.ended else end.connect(lane))


class World:
    """Each engine has a session with each other one, which is replaced when it ends; all go on over it both ways."""

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        self._numbers = count(1)
        self.engines = [Engine(self, number) for number in range(ENGINES)]
        self.sessions = [Session(pair) for pair in ((0, 1), (1, 2), (2, 0))]
        self.ended: list[Session] = []

    def send(self, session: Session, sizes: tuple[int, ...], *, back: bool) -> Transfer:
        """One that the receiver has accepted."""
        number = next(self._numbers)
        source = [np.random.default_rng(number).integers(1, 256, size, dtype=np.uint8) for size in sizes]
        target = [np.zeros(size, dtype=np.uint8) for size in sizes]
        transfer = Transfer(number, session, session.engines[back], source, target)
        self.transfers[number] = transfer
        offer = Offer(number=number, transfer_id="!", part=0, item_bytes=sizes, lease_s=0)
        self.engines[transfer.receiver].expect(session, offer, memory_of(target))  # type: ignore[arg-type]
        return transfer

    def ready(self, transfer: Transfer, item: int) -> None:
        """The bytes of an item are there; it is sent once, and not after the end."""
        if transfer.session.is_up and not transfer.source_told and item not in transfer.started:
            transfer.started.add(item)
            session: Any = transfer.session
            self.engines[transfer.sender].start_item(session, transfer.number, item, memory_of(transfer.source))

    def stop(self, transfer: Transfer, *, source: bool) -> None:
        """One of its engines gives it up, or has heard that it has ended."""
        session: Any = transfer.session
        if source and not transfer.source_told:
            transfer.source_told = True
            if transfer.started:
                self.engines[transfer.sender].stop_source(session, transfer.number)
        elif not source and not (transfer.landing_told or transfer.has_landed):
            transfer.landing_told = True
            self.engines[transfer.receiver].stop_landing(session, transfer.number)

    def check_copy(self, part: Part, to_flat: bool) -> None:
        """What is copied is not over."""
        transfer = self.transfers[part.run.number]
        assert not (transfer.released if to_flat else transfer.stopped)

    def lose(self, session: Session) -> None:
        """Both engines learn of it later; what was said is lost."""
        if session.is_up:
            session.is_up = False
            for messages in session.messages.values():
                messages.clear()
            self.ended.append(session)
            self.sessions[self.sessions.index(session)] = Session(session.engines)
            for number in session.engines:
                self.engines[number].posts.append(partial(self.engines[number].lose, session))

    def actions(self) -> list[Action]:
        """All that can happen next by itself."""
        found: list[Action] = []
        for engine in self.engines:
            found += [partial(_first, engine.posts)] * bool(engine.posts)
            found += [copies.end for copies in engine.copies if copies.pending]
        for session in [*self.sessions, *self.ended]:
            found += [partial(_first, session.unconnected)] * bool(session.unconnected)
            for lane in session.lanes.values():
                found += [partial(_first, lane.tasks)] * bool(lane.tasks)
            if not session.is_stuck:
                found += self._between(session)
        return found

    def _between(self, session: Session) -> list[Action]:
        found: list[Action] = []
        for number in session.engines:
            found += [partial(self.engines[number].hear, session)] * bool(session.messages[number])
            sender, receiver = session.lanes.get((number, True)), session.lanes.get((session.other(number), False))
            if sender is not None and receiver is not None and sender.exchanges and receiver.exchanges:
                found.append(partial(exchanged, sender, receiver))
        return found

    def settle(self) -> None:
        """Let everything happen that can."""
        for turn in range(100_000):
            actions = self.actions()
            if not actions:
                return
            actions[turn * 7 % len(actions)]()
        raise AssertionError("it never ends")


def memory_of(items: list[np.ndarray[Any, Any]]) -> FlatMemory:
    return FlatMemory(tuple((item.ctypes.data, item.nbytes) for item in items), items)


def _first(queue: deque[Action]) -> None:
    """Do what was queued first."""
    queue.popleft()()
