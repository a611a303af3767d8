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
from kvferry.p2p.signal.messages import Message, Push

EXCHANGE_S = 30.0

Post = Callable[[Callable[[], None]], None]


class Piece(NamedTuple):
    """A part of a transfer's item."""

    number: int
    item: int
    part: Part


@dataclass(slots=True, eq=False)
class Outlet:
    """For the loop's thread. Queued parts are gathered into slots, pushed, and sent in the order of the pushes.

    Once a part has been gathered nothing reads the blocks any more: it may be sent though its transfer has ended.
    """

    ring: Ring
    slots: Slots
    tell: Callable[[Message], None]
    post: Post
    released: Callable[[int], None]
    failed: Callable[[Exception], None]
    lane: Lane | None = None
    ended: bool = False
    queue: deque[Piece] = field(default_factory=deque)
    reading: Counter[int] = field(default_factory=Counter)
    stopping: set[int] = field(default_factory=set)
    pushed: deque[tuple[int, int]] = field(default_factory=deque)  # slots, and how much is in them

    def pump(self) -> None:
        """Gather as much as there are slots for."""
        while self.queue and self.lane is not None and not self.ended:
            slot = self.slots.take(self)
            if slot is None:
                return
            piece = self.queue.popleft()
            self.reading[piece.number] += 1
            self.ring.gather(
                piece.part,
                slot,
                lambda error, piece=piece, slot=slot: self.post(  # type: ignore[misc]
                    partial(self._gathered, piece, slot, error)
                ),
            )

    def stop(self, number: int) -> None:
        """Read a transfer's blocks no more, then say so."""
        self.queue = deque(piece for piece in self.queue if piece.number != number)
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

    def _gathered(self, piece: Piece, slot: int, error: Exception | None) -> None:
        self.reading[piece.number] -= 1
        self._look(piece.number)
        if self.ended or error is not None:
            self.slots.give_back(slot)
            if error is not None:
                self.failed(error)
            return
        part = piece.part
        self.pushed.append((slot, part.end - part.begin))
        self.tell(Push(number=piece.number, item=piece.item, begin=part.begin, end=part.end))

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
