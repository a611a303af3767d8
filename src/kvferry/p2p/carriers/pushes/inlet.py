"""What one session receives."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import NcclStuckError, ProtocolError
from kvferry.p2p.carriers.pushes.lane import Lane
from kvferry.p2p.carriers.pushes.outlet import EXCHANGE_S, Post
from kvferry.p2p.carriers.pushes.ring import Part, Ring
from kvferry.p2p.carriers.pushes.slots import Slots
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import Memory
from kvferry.p2p.signal.messages import Go, Message, Push


@dataclass(slots=True, eq=False)
class Expected:
    """Where a transfer is to land, how far each item has come, and which are still to land."""

    memory: Memory
    pieces: Callable[[int], tuple[Piece, ...]]
    item_bytes: tuple[int, ...]
    written: Counter[int] = field(default_factory=Counter)
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left.update(range(len(self.item_bytes)))

    def size(self, item: int) -> int:
        """Bytes of an item; 0 where there is none."""
        return self.item_bytes[item] if item < len(self.item_bytes) else 0


@dataclass(slots=True, eq=False)
class Inlet:
    """For the loop's thread. Each push gets a slot in its turn; what has landed there is scattered, or dropped.

    A slot never waits for anything but its own exchange and its own scatter, so all slots come back.
    """

    ring: Ring
    slots: Slots
    tell: Callable[[Message], None]
    post: Post
    landed: Callable[..., None]
    stopped: Callable[[int], None]
    failed: Callable[[Exception], None]
    lane: Lane | None = None
    ended: bool = False
    pushes: deque[Push] = field(default_factory=deque)
    expected: dict[int, Expected] = field(default_factory=dict)
    writing: Counter[int] = field(default_factory=Counter)
    stopping: set[int] = field(default_factory=set)

    def push(self, message: Push) -> None:
        """The peer has something ready."""
        if message.begin == message.end == 0:
            self._land_nothing(message)
            return
        if not 0 < message.end - message.begin <= self.ring.slot_bytes:
            raise ProtocolError(f"a push of bytes {message.begin} to {message.end}: a slot has {self.ring.slot_bytes}")
        self.pushes.append(message)
        self.pump()

    def pump(self) -> None:
        """Give pushes their slots."""
        while self.pushes and self.lane is not None and not self.ended:
            slot = self.slots.take(self)
            if slot is None:
                return
            push = self.pushes.popleft()
            future = self.lane.exchange(receives=[(slot, push.end - push.begin)], timeout_s=EXCHANGE_S)
            self.tell(Go())
            future.add_done_callback(
                lambda done, push=push, slot=slot: self.post(partial(self._received, push, slot, done))  # type: ignore[misc]
            )

    def stop(self, number: int) -> None:
        """Write no more of a transfer, then say so."""
        self.expected.pop(number, None)
        self.stopping.add(number)
        self._look(number)

    def end(self, why: str) -> None:
        """The session has ended: take no more."""
        self.ended = True
        self.pushes.clear()
        self.expected.clear()
        if self.lane is not None:
            self.lane.abort(why)

    def _received(self, push: Push, slot: int, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            if not isinstance(error, NcclStuckError):
                self.slots.give_back(slot)  # else the GPU may still use it: it is lost
            if isinstance(error, Exception) and not self.ended:
                self.failed(error)
            return
        wanted = self.expected.get(push.number)
        if wanted is None or self.ended:  # stopped meanwhile
            self.slots.give_back(slot)
            return
        items = range(push.item, push.item + push.items)
        size = sum(map(wanted.size, items))
        begin = sum(wanted.written[item] for item in items)
        whole = push.begin == 0 and push.end == size
        if (
            push.begin != begin
            or push.end > size
            or not (whole or push.items == 1)
            or not wanted.left.issuperset(items)
        ):
            self.slots.give_back(slot)
            self.failed(ProtocolError(f"bytes {push.begin} to {push.end} of items {items}, which have {size}"))
            return
        for item in items:
            wanted.written[item] = push.end if push.items == 1 else wanted.size(item)
        part = Part(wanted.memory, push.item, tuple(map(wanted.pieces, items)), push.begin, push.end)
        self.writing[push.number] += 1
        self.ring.scatter(part, slot, lambda problem: self.post(partial(self._scattered, push, slot, size, problem)))

    def _scattered(self, push: Push, slot: int, size: int, error: Exception | None) -> None:
        self.writing[push.number] -= 1
        self._look(push.number)
        self.slots.give_back(slot)
        if error is not None:
            self.failed(error)
        elif push.end == size:
            self._land(push.number, *range(push.item, push.item + push.items))

    def _land_nothing(self, push: Push) -> None:
        """An item of no bytes, which needs no slot."""
        wanted = self.expected.get(push.number)
        if wanted is not None and wanted.size(push.item):
            raise ProtocolError(f"no bytes of item {push.item}, which has {wanted.size(push.item)}")
        self._land(push.number, push.item)

    def _land(self, number: int, *items: int) -> None:
        wanted = self.expected.get(number)
        if wanted is None or not wanted.left.issuperset(items):
            return
        wanted.left.difference_update(items)
        if not wanted.left:
            del self.expected[number]
        self.landed(number, *items)

    def _look(self, number: int) -> None:
        if not self.writing[number]:
            del self.writing[number]
            if number in self.stopping:
                self.stopping.discard(number)
                self.stopped(number)
