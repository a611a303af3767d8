"""What one session sends."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.errors import NcclStuckError, ProtocolError
from kvferry.p2p.carriers.pushes.buffers import Buffers, Loan
from kvferry.p2p.carriers.pushes.lane import Lane
from kvferry.p2p.carriers.pushes.pipes import SendPipe
from kvferry.p2p.carriers.pushes.run import Run
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import Memory
from kvferry.p2p.signal.messages import MAX_RUN_ITEMS, Go, Message, Push

MAX_AHEAD = 2  # runs that are agreed on: the next begins where one ends
_SLOTS_A_RUN = 8
GO_S = 120.0  # that a peer may take to begin what was pushed: it waits for a buffer, and each of its runs has an end
_MAX_PIECES = 32_768  # of a run of several items: what the copy reads of them has its limits

Post = Callable[[Callable[[], None]], None]


class Item(NamedTuple):
    """A transfer's item of `nbytes` bytes."""

    number: int
    item: int
    memory: Memory
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(slots=True, eq=False)
class Outlet:
    """For the loop's thread. Queued items are pushed in runs, as far as a buffer allows, and begun when the peer says.

    Items of a transfer that follow each other go as one run: what agreeing costs would else be most of it. What has
    been pushed is read to its end, whatever becomes of its transfer.
    """

    buffers: Buffers
    tell: Callable[[Message], None]
    post: Post
    released: Callable[[int], None]
    failed: Callable[[Exception], None]
    lane: Lane | None = None
    ended: bool = False
    queue: deque[Item] = field(default_factory=deque)
    reading: Counter[int] = field(default_factory=Counter)
    _stopping: set[int] = field(default_factory=set)
    _pushed: deque[Run] = field(default_factory=deque)
    _go_by: float = math.inf
    _begun: int = 0
    _loan: Loan = field(init=False)
    _pipe: SendPipe | None = None

    def __post_init__(self) -> None:
        self._loan = Loan(self.buffers, self, self.failed)

    def connect(self, lane: Lane) -> None:
        """Send over this lane from now on."""
        self.lane = lane
        self._pipe = SendPipe(lane, lambda run, error: self.post(partial(self._done, run, error)))
        self.pump()

    def pump(self) -> None:
        """Push as much as may be agreed on at once."""
        while self.queue and self._pipe is not None and not self.ended:
            agreed = len(self._pushed) + self._begun
            buffer = self._loan.buffer
            if buffer is None:
                buffer = self._loan.take()
                if buffer is None:
                    return
            elif agreed >= MAX_AHEAD or (agreed and self._loan.is_due):
                return
            part_bytes = buffer.slot_bytes
            run = self._next_run(_SLOTS_A_RUN * part_bytes)
            self.reading[run.number] += 1
            self._pushed.append(run)
            self._go_by = min(self._go_by, time.monotonic() + GO_S)
            items = len(run.sizes)
            self.tell(Push(number=run.number, item=run.item, items=items, nbytes=run.nbytes, part_bytes=part_bytes))
            buffer.copies.prepare(run)

    def _next_run(self, max_bytes: int) -> Run:
        first = self.queue.popleft()
        items, pieces = [first], len(first.pieces)
        nbytes = first.nbytes
        while self.queue and len(items) < MAX_RUN_ITEMS:
            other = self.queue[0]
            nbytes += other.nbytes
            pieces += len(other.pieces)
            follows = (other.number, other.item) == (first.number, first.item + len(items))
            if not follows or nbytes > max_bytes or pieces > _MAX_PIECES:
                break
            items.append(self.queue.popleft())
        every, sizes = tuple(item.pieces for item in items), tuple(item.nbytes for item in items)
        return Run(first.number, first.item, first.memory, every, sizes)

    def stop(self, number: int) -> None:
        """Read a transfer's blocks no more, then say so."""
        self.queue = deque(item for item in self.queue if item.number != number)
        if not self.queue:
            self._loan.forget()
        self._stopping.add(number)
        self._look(number)

    def go(self, message: Go) -> None:
        """The peer is ready for the first run that was pushed. Raises ProtocolError where that cannot be."""
        buffer = self._loan.buffer
        if self.lane is None or self._pipe is None or buffer is None or not self._pushed:
            raise ProtocolError("a go for nothing that was pushed")
        if message.part_bytes > buffer.slot_bytes:
            raise ProtocolError(f"a go for parts of {message.part_bytes} bytes, slots have {buffer.slot_bytes}")
        run = self._pushed.popleft()
        self._go_by = time.monotonic() + GO_S if self._pushed else math.inf
        run.part_bytes = message.part_bytes
        self._begun += 1
        self.lane.call(partial(self._pipe.start, run, buffer))

    def is_late(self, now: float) -> bool:
        """Whether the peer should have begun the first run that was pushed."""
        return now > self._go_by

    def end(self, why: str) -> None:
        """The session has ended: begin nothing more. What runs is waited for; stops are still answered."""
        self.ended = True
        self.queue.clear()
        self._loan.forget()
        while self._pushed:
            self._read(self._pushed.popleft())
        self._settle()
        if self.lane is not None:
            self.lane.abort(why)

    def _done(self, run: Run, error: Exception | None) -> None:
        self._begun -= 1
        if isinstance(error, NcclStuckError):
            self._loan.lose()
        self._read(run)
        if error is not None and not self.ended:
            self.failed(error)
        self._settle()
        self.pump()

    def _settle(self) -> None:
        """Give the buffer back where nothing needs it."""
        if not (self._begun or self._pushed):
            self._loan.give_back()

    def _read(self, run: Run) -> None:
        self.reading[run.number] -= 1
        self._look(run.number)

    def _look(self, number: int) -> None:
        if not self.reading[number]:
            del self.reading[number]
            if number in self._stopping:
                self._stopping.discard(number)
                self.released(number)
