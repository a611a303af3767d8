"""What one session receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import NcclStuckError, ProtocolError
from kvferry.p2p.carriers.pushes.buffers import Buffers, Loan
from kvferry.p2p.carriers.pushes.lane import Lane
from kvferry.p2p.carriers.pushes.outlet import MAX_AHEAD, Post
from kvferry.p2p.carriers.pushes.pipes import ReceivePipe
from kvferry.p2p.carriers.pushes.run import Run
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import Memory
from kvferry.p2p.signal.messages import Go, Message, Push


@dataclass(slots=True, eq=False)
class Expected:
    """Where a transfer is to land, and which of its items have not been pushed."""

    memory: Memory
    pieces: Callable[[int], tuple[Piece, ...]]
    item_bytes: tuple[int, ...]
    to_come: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.to_come.update(range(len(self.item_bytes)))

    def run(self, push: Push) -> Run:
        """What was pushed, as it is to land. Raises ProtocolError where it is not what was to come."""
        items = range(push.item, push.item + push.items)
        if not self.to_come.issuperset(items):
            raise ProtocolError(f"{items} of transfer {push.number}, of which {sorted(self.to_come)} were to come")
        sizes = tuple(self.item_bytes[item] for item in items)
        if sum(sizes) != push.nbytes:
            raise ProtocolError(f"{push.nbytes} bytes of items {items}, which have {sizes}")
        self.to_come.difference_update(items)
        return Run(push.number, push.item, self.memory, tuple(map(self.pieces, items)), sizes, push.part_bytes)


@dataclass(slots=True, eq=False)
class Inlet:
    """For the loop's thread. Runs that the peer pushes get a buffer in their turn; then both sides begin.

    `landed` may be called in any thread, all else in the loop's. A run waits for nothing but its own parts, so all
    buffers come back.
    """

    buffers: Buffers
    tell: Callable[[Message], None]
    post: Post
    landed: Callable[..., None]
    stopped: Callable[[int], None]
    failed: Callable[[Exception], None]
    lane: Lane | None = None
    ended: bool = False
    expected: dict[int, Expected] = field(default_factory=dict)
    _pushes: deque[Run] = field(default_factory=deque)
    _begun: int = 0
    _loan: Loan = field(init=False)
    _pipe: ReceivePipe | None = None

    def __post_init__(self) -> None:
        self._loan = Loan(self.buffers, self, self.failed)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is under way."""
        return not self._begun

    def connect(self, lane: Lane) -> None:
        """Receive over this lane from now on."""
        self.lane = lane
        self._pipe = ReceivePipe(lane, lambda run, error: self.post(partial(self._done, run, error)), self.landed)
        self.pump()

    def push(self, message: Push) -> None:
        """The peer has something ready. Raises ProtocolError where it was not to come."""
        wanted = self.expected.get(message.number)
        if wanted is None:  # stopped meanwhile: it still comes, and is dropped
            run = Run(message.number, message.item, None, (), (message.nbytes,), message.part_bytes, wanted=False)
        else:
            run = wanted.run(message)
            if not wanted.to_come:
                del self.expected[message.number]
        if not run.nbytes:
            if run.wanted:
                self.landed(run.number, *range(run.item, run.item + len(run.sizes)))
            return
        if len(self._pushes) >= MAX_AHEAD:
            raise ProtocolError(f"more than {MAX_AHEAD} runs at once that wait to be begun")
        self._pushes.append(run)
        self.pump()

    def pump(self) -> None:
        """Begin what there is a buffer for: no more runs than a peer begins that sends what it has pushed."""
        while self._pushes and self._pipe is not None and self.lane is not None and not self.ended:
            buffer = self._loan.buffer
            if buffer is None:
                buffer = self._loan.take()
                if buffer is None:
                    return
            elif self._begun and (self._loan.is_due or self._begun >= MAX_AHEAD + len(buffer.slots)):
                return
            run = self._pushes.popleft()
            run.part_bytes = min(run.part_bytes, buffer.slot_bytes)
            self._begun += 1
            self.lane.call(partial(self._pipe.start, run, buffer))
            self.tell(Go(part_bytes=run.part_bytes))
            if run.wanted:
                buffer.copies.prepare(run)

    def stop(self, number: int) -> None:
        """Write no more of a transfer, then say so."""
        self.expected.pop(number, None)
        for run in self._pushes:
            run.wanted = run.wanted and run.number != number
        if self.lane is None or self._pipe is None:
            self.stopped(number)
        else:
            self.lane.call(partial(self._pipe.stop, number, partial(self.post, partial(self.stopped, number))))

    def end(self, why: str) -> None:
        """The session has ended: begin nothing more. What runs is waited for; stops are still answered."""
        self.ended = True
        self._pushes.clear()
        self.expected.clear()
        self._loan.forget()
        self._settle()
        if self.lane is not None:
            self.lane.abort(why)

    def _done(self, _run: Run, error: Exception | None) -> None:
        self._begun -= 1
        if isinstance(error, NcclStuckError):
            self._loan.lose()
        if error is not None and not self.ended:
            self.failed(error)
        self._settle()
        self.pump()

    def _settle(self) -> None:
        """Give the buffer back where nothing needs it."""
        if not self._begun:
            self._loan.give_back()
