"""What one session sends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.errors import NcclStuckError
from kvferry.p2p.carriers.pushes.lane import Lane
from kvferry.p2p.carriers.pushes.ring import Part, Ring
from kvferry.p2p.carriers.pushes.slots import Slots
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import BlockMemory, Memory
from kvferry.p2p.signal.messages import Message, Push

EXCHANGE_S = 30.0
MAX_TOGETHER = 256  # items of one part

Post = Callable[[Callable[[], None]], None]


class Item(NamedTuple):
    """What is left, from byte `begin` on, of a transfer's item of `nbytes` bytes."""

    number: int
    item: int
    memory: Memory
    pieces: tuple[Piece, ...]
    nbytes: int
    begin: int = 0


@dataclass(slots=True, eq=False)
class Outlet:
    """For the loop's thread. Queued items are gathered into slots, pushed, and sent in the order of the pushes.

    An item goes in parts of a slot each, and several items of a transfer that follow each other and fit go as one: what
    a part costs beside its bytes would else be most of it. Once a part has been gathered nothing reads the blocks any
    more: it may be sent though its transfer has ended.
    """

    ring: Ring
    slots: Slots
    tell: Callable[[Message], None]
    post: Post
    released: Callable[[int], None]
    failed: Callable[[Exception], None]
    lane: Lane | None = None
    ended: bool = False
    queue: deque[Item] = field(default_factory=deque)
    reading: Counter[int] = field(default_factory=Counter)
    stopping: set[int] = field(default_factory=set)
    pushed: deque[tuple[int, int]] = field(default_factory=deque)  # slots, and how much is in them

    def pump(self) -> None:
        """Gather as much as there are slots for."""
        while self.queue and self.lane is not None and not self.ended:
            slot = self.slots.take(self)
            if slot is None:
                return
            number, part = self._next_part()
            self.reading[number] += 1
            self.ring.gather(
                part,
                slot,
                lambda error, number=number, part=part, slot=slot: self.post(  # type: ignore[misc]
                    partial(self._gathered, number, part, slot, error)
                ),
            )

    def _next_part(self) -> tuple[int, Part]:
        """What goes into the next slot, and of which transfer it is."""
        room = self.ring.slot_bytes
        first = self.queue.popleft()
        number, item, memory, pieces, nbytes, begin = first
        if begin or nbytes > room:
            end = min(begin + room, nbytes)
            if end < nbytes:
                self.queue.appendleft(first._replace(begin=end))
            return number, Part(memory, item, (pieces,), begin, end)
        together = [pieces]
        while self.queue and isinstance(memory, BlockMemory) and len(together) < MAX_TOGETHER:
            other = self.queue[0]
            follows = other.number == number and other.item == item + len(together) and not other.begin
            if not follows or nbytes + other.nbytes > room:
                break
            together.append(self.queue.popleft().pieces)
            nbytes += other.nbytes
        return number, Part(memory, item, tuple(together), 0, nbytes)

    def stop(self, number: int) -> None:
        """Read a transfer's blocks no more, then say so."""
        self.queue = deque(item for item in self.queue if item.number != number)
        self.stopping.add(number)
        self._look(number)

    def go(self) -> bool:
        """The peer has a slot for the first push; False where there is none."""
        if not self.pushed or self.lane is None:
            return False
        slot, nbytes = self.pushed.popleft()
        future = self.lane.exchange(sends=[(slot, nbytes)], timeout_s=EXCHANGE_S)
        future.add_done_callback(lambda done: self.post(partial(self._sent, slot, done)))
        return True

    def end(self, why: str) -> None:
        """The session has ended: send no more. Gathers that run are waited for; stops are still answered."""
        self.ended = True
        self.queue.clear()
        for slot, _ in self.pushed:
            self.slots.give_back(slot)
        self.pushed.clear()
        if self.lane is not None:
            self.lane.abort(why)

    def _gathered(self, number: int, part: Part, slot: int, error: Exception | None) -> None:
        self.reading[number] -= 1
        self._look(number)
        if self.ended or error is not None:
            self.slots.give_back(slot)
            if error is not None:
                self.failed(error)
            return
        self.pushed.append((slot, part.end - part.begin))
        self.tell(Push(number=number, item=part.item, begin=part.begin, end=part.end, items=len(part.pieces)))

    def _sent(self, slot: int, done: Future[None]) -> None:
        error = done.exception()
        if not isinstance(error, NcclStuckError):
            self.slots.give_back(slot)  # else the GPU may still use it: it is lost
        if isinstance(error, Exception) and not self.ended:
            self.failed(error)

    def _look(self, number: int) -> None:
        if not self.reading[number]:
            del self.reading[number]
            if number in self.stopping:
                self.stopping.discard(number)
                self.released(number)
