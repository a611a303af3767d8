"""What moves the runs of one direction of a session, part by part, in the thread of its lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvferry.errors import KVFerryError, NcclStuckError
from kvferry.p2p.carriers.pushes.buffers import Buffer
from kvferry.p2p.carriers.pushes.lane import Lane
from kvferry.p2p.carriers.pushes.run import Part, Run

_EXCHANGE_S = 30.0

RunDone = Callable[[Run, Exception | None], None]


class Pipe(ABC):
    """All but the constructor is for the lane's thread, in which it also tells what it tells.

    Each part has a slot from when it is begun until it is done, and parts are begun in the order of the runs. After the
    first failure nothing new is begun, and all runs end with it once no part is under way.
    """

    def __init__(self, lane: Lane, done: RunDone) -> None:
        self._lane = lane
        self._done = done
        self._buffer: Buffer | None = None
        self._free: deque[int] = deque()
        self._runs: deque[Run] = deque()  # those that are not done
        self._to_begin: deque[Run] = deque()  # those of them that have parts which are not begun
        self._begun_bytes = 0  # of the first of these
        self._under_way = 0
        self._error: Exception | None = None

    def start(self, run: Run, buffer: Buffer) -> None:
        """Move it, behind those before it. There is one buffer at a time."""
        if buffer is not self._buffer:
            self._buffer, self._free = buffer, deque(buffer.slots)
        self._runs.append(run)
        self._to_begin.append(run)
        self._go_on()

    @abstractmethod
    def _begin(self, part: Part, slot: int) -> None:
        """Do what comes first."""

    def _exchanged(self, part: Part, slot: int, then: Callable[[], None], *, sent: bool) -> None:
        """Send a slot, or receive into it, and go on with `then` unless that fails."""

        def ended(future: Future[None]) -> None:
            error = future.exception()
            if error is None:
                then()
            else:
                self._failed(error)

        slots = [(slot, part.nbytes)]
        try:
            future = (
                self._lane.exchange(sends=slots, timeout_s=_EXCHANGE_S)
                if sent
                else self._lane.exchange(receives=slots, timeout_s=_EXCHANGE_S)
            )
        except KVFerryError as error:
            self._failed(error)
        else:
            future.add_done_callback(ended)

    def _copied(self, part: Part, slot: int, then: Callable[[Exception | None], None], *, to_flat: bool) -> None:
        """Fill a slot, or empty it, and go on with `then` in the lane's thread."""
        assert self._buffer is not None
        copies = self._buffer.copies
        try:
            copies.copy(part, slot, lambda error: self._lane.call(partial(then, error)), to_flat=to_flat)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else would say that the part has failed
            then(error)

    def _finished(self, part: Part, slot: int) -> None:
        """A part is done; where one before it has failed its run ends as all others do."""
        self._under_way -= 1
        self._free.append(slot)
        if part.is_last and self._error is None:
            self._runs.remove(part.run)
            self._done(part.run, None)
        self._go_on()

    def _failed(self, error: BaseException) -> None:
        """A part has failed; that a slot may still be in use counts more than why."""
        self._under_way -= 1
        if self._error is None or isinstance(error, NcclStuckError):
            self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._go_on()

    def _go_on(self) -> None:
        while self._error is None and self._to_begin and self._free:
            run, begin = self._to_begin[0], self._begun_bytes
            part = Part(run, begin, min(begin + run.part_bytes, run.nbytes))
            self._begun_bytes = part.end
            if part.is_last:
                self._to_begin.popleft()
                self._begun_bytes = 0
            self._under_way += 1
            self._begin(part, self._free.popleft())
        if self._error is not None and not self._under_way:
            self._to_begin.clear()
            while self._runs:
                self._done(self._runs.popleft(), self._error)


class SendPipe(Pipe):
    """Gathers parts into slots, and sends each once it is there: nothing that is launched waits for a gather."""

    def _begin(self, part: Part, slot: int) -> None:
        self._copied(part, slot, partial(self._gathered, part, slot), to_flat=True)

    def _gathered(self, part: Part, slot: int, error: Exception | None) -> None:
        problem = error or self._error
        if problem is not None:
            self._failed(problem)
        else:
            self._exchanged(part, slot, partial(self._finished, part, slot), sent=True)


class ReceivePipe(Pipe):
    """Receives parts into slots and scatters each, unless it is not wanted any more."""

    def __init__(self, lane: Lane, done: RunDone, landed: Callable[..., None]) -> None:
        """`landed(number, *items)` is called when all bytes of items are in their places."""
        super().__init__(lane, done)
        self._landed = landed
        self._writing: Counter[int] = Counter()  # parts of each transfer that are being scattered
        self._stops: list[tuple[int, Callable[[], None]]] = []

    def stop(self, number: int, then: Callable[[], None]) -> None:
        """Write nothing more of a transfer; call `then` once nothing of it is being written."""
        for run in self._runs:
            if run.number == number:
                run.wanted = False
        self._stops.append((number, then))
        self._answer_stops()

    def _begin(self, part: Part, slot: int) -> None:
        self._exchanged(part, slot, partial(self._received, part, slot), sent=False)

    def _received(self, part: Part, slot: int) -> None:
        if part.run.wanted and self._error is None:
            self._writing[part.run.number] += 1
            self._copied(part, slot, partial(self._scattered, part, slot), to_flat=False)
        else:
            self._finished(part, slot)

    def _scattered(self, part: Part, slot: int, error: Exception | None) -> None:
        run = part.run
        self._writing[run.number] -= 1
        if not self._writing[run.number]:
            del self._writing[run.number]
        if error is None and self._error is None and run.wanted:  # else a part before it may have failed
            items = run.items_ending(part.begin, part.end)
            if items:
                self._landed(run.number, *items)
        self._answer_stops()
        if error is None:
            self._finished(part, slot)
        else:
            self._failed(error)

    def _answer_stops(self) -> None:
        ready = [stop for stop in self._stops if not self._writing[stop[0]]]
        self._stops = [stop for stop in self._stops if self._writing[stop[0]]]
        for _, then in ready:
            then()
