"""A communicator of two ranks: this process and one peer."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.errors import CudaError, KVFerryError, NcclCallError, NcclError, NcclPeerError, NcclStuckError
from kvferry.p2p.nccl.ending import Ending
from kvferry.p2p.nccl.functions import SYSTEM_ERROR
from kvferry.p2p.nccl.lane import Exchange, Lane, Range
from kvferry.p2p.nccl.library import NCCLLibrary
from kvferry.p2p.nccl.preflight import shm_note

_ADDRESSES = 1 << 63  # more than a device has

Post = Callable[[Callable[[], object]], bool]


class State(enum.Enum):
    """Where a communicator is in its life; it only goes on, from top to bottom."""

    CONNECTING = "connecting"
    READY = "ready"
    CLOSING = "closing"  # takes no new exchanges, does those that it has
    ENDING = "ending"  # being aborted, in a thread of its own
    ENDED = "ended"


class Communicator:
    """One peer, made by `NcclLauncher.connect`.

    Its public methods are for any thread and return at once: they leave their task to the launcher's thread, which
    makes all NCCL calls but the last. Futures end in that thread too, and so do their callbacks, which must be short.
    Nothing waits for the peer without a deadline. After the first failure all that is not done fails, within the
    launcher's `end_timeout_s`, and the communicator is of no more use: make a new one.
    """

    def __init__(
        self, library: NCCLLibrary, post: Post, lane: Lane, *, begin: Callable[[], int], name: str, end_timeout_s: float
    ) -> None:
        self.name = name
        self.ended: Future[None] = Future()
        self._library = library
        self._post = post
        self._lane = lane
        self._begin = begin
        self._end_timeout_s = end_timeout_s
        self._state = State.CONNECTING
        self._handle = 0
        self._deadline = 0.0  # of the state; 0 is none
        self._ending: Ending | None = None
        self._error: KVFerryError | None = None
        self._chores: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.ended.set_running_or_notify_cancel()

    @property
    def state(self) -> State:
        return self._state

    @property
    def busy(self) -> bool:
        """Whether there is anything that the launcher's thread has to look at."""
        return self._lane.busy or bool(self._chores) or self._state is not State.READY

    def exchange(
        self, *, sends: Sequence[Range] = (), receives: Sequence[Range] = (), timeout_s: float
    ) -> Future[None]:
        """Send and receive ranges (address, nbytes) of device memory, all in one launch.

        The peer has to call with as many ranges of the same sizes, its receives for these sends and in the same order,
        and both sides have to call in the same order: what differs hangs until the deadline. When the future is done
        well the received bytes are there and the sent ones may be overwritten. When it failed the GPU has ended with
        the memory too, unless the error is NcclStuckError. What ran on the memory before has to be done already.
        """
        exchange = Exchange(sends, receives, time.monotonic() + timeout_s)
        ranges = (*exchange.sends, *exchange.receives)
        if not ranges or any(not 0 < address < _ADDRESSES or nbytes <= 0 for address, nbytes in ranges):
            raise ValueError(f"an exchange has at least one range, each of at least one byte at an address: {ranges}")
        self._give(partial(self._accept, exchange))
        return exchange.future

    def call(self, task: Callable[[], None]) -> None:
        """Have the launcher's thread call it, also once this one has ended; where that thread has, call it here."""
        if not self._post(task):
            task()

    def register(self, address: int, nbytes: int) -> Future[int]:
        """Register device memory, so that transfers from and to it pass NCCL's own buffers by; gives a handle.

        It is worth it for memory of `NCCLLibrary.ncclMemAlloc`, and only if both sides do. Ends with the communicator.
        """
        address, nbytes = int(address), int(nbytes)
        return self._chore(lambda: self._library.ncclCommRegister(self._handle, address, nbytes))

    def unregister(self, handle: int) -> Future[None]:
        """Undo `register`; no exchange may be using the memory."""
        return self._chore(lambda: self._library.ncclCommDeregister(self._handle, handle))

    def abort(self, reason: str) -> Future[None]:
        """End it now, failing what is under way; for when the peer is known to be dead. Gives `ended`."""
        self._post(partial(self._abort, reason))
        return self.ended

    def close(self) -> Future[None]:
        """End it well: what it has to do is done first, as far as that takes `end_timeout_s`. Gives `ended`."""
        self._post(self._close)
        return self.ended

    def step(self, now: float, *, depth: int) -> bool:
        """Go on as far as it goes without waiting; whether anything changed. For the launcher's thread."""
        try:
            if self._state is State.CONNECTING:
                return self._step_connecting(now)
            if self._state in (State.READY, State.CLOSING):
                return self._step_exchanges(now, depth)
            return self._state is State.ENDING and self._step_ending(now)
        except (NcclError, CudaError) as error:
            self._fail(error)
            return True

    def lose(self) -> None:
        """Fail everything, as the launcher's thread is about to end without having ended this one."""
        if self._state is not State.ENDED:
            self._finish(NcclStuckError(f"{self.name}: the thread that makes its calls ended"))

    def _step_connecting(self, now: float) -> bool:
        if not self._handle:
            self._handle = self._begin()
        elif self._library.ncclCommGetAsyncError(self._handle):
            self._state = State.READY
        else:
            self._lane.check_deadlines(now)  # the first exchange's, which waits already
            return False
        return True

    def _step_exchanges(self, now: float, depth: int) -> bool:
        changed = self._lane.step(self._handle, depth=depth, now=now)
        if self._chores and not self._lane.launching:
            future, call = self._chores.popleft()
            _run(future, call)
            return True
        if self._state is State.CLOSING and not self._lane.busy:
            self._end()
            return True
        if self._state is State.CLOSING and now > self._deadline:
            raise NcclPeerError(f"it was closed, and what it had to do took over {self._end_timeout_s} s")
        return changed

    def _step_ending(self, now: float) -> bool:
        """Wait until the communicator is freed and its stream ran dry: only then is the memory nobody's any more."""
        ended = self._ending is None or self._ending.done
        if self._ending is not None and self._ending.error is not None:
            raise self._ending.error
        if ended and self._lane.idle():
            self._finish(None)
        elif now > self._deadline:
            what = "the GPU went on" if ended else "NCCL did not return"
            self._finish(
                NcclStuckError(f"{self._error or self.name}; ending it took over {self._end_timeout_s} s: {what}")
            )
        else:
            return False
        return True

    def _accept(self, exchange: Exchange) -> None:
        if self._state in (State.CONNECTING, State.READY):
            self._lane.add(exchange)
        else:
            exchange.future.set_exception(self._why_not())

    def _chore(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._give(partial(self._accept_chore, future, call))
        return future

    def _give(self, task: Callable[[], None]) -> None:
        if not self._post(task):
            raise NcclError(f"{self.name}: its launcher is closed")

    def _accept_chore(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if self._state in (State.CONNECTING, State.READY):
            self._chores.append((future, call))
        else:
            future.set_exception(self._why_not())

    def _abort(self, reason: str) -> None:
        if self._state not in (State.ENDING, State.ENDED):
            self._fail(NcclPeerError(reason))

    def _close(self) -> None:
        if self._state is State.CONNECTING:
            self._fail(NcclPeerError("it was closed before it was connected"))
        elif self._state is State.READY:
            self._enter(State.CLOSING)

    def _fail(self, error: KVFerryError) -> None:
        """Begin to end it for a failure; of an end that fails itself nothing is left to be done but to say so."""
        if self._state is State.ENDING:
            self._finish(NcclStuckError(f"{self._error or self.name}; ending it failed: {error}"))
            return
        connecting = self._state is State.CONNECTING
        suspected = connecting or (isinstance(error, NcclCallError) and error.code == SYSTEM_ERROR)
        self._error = NcclPeerError(
            f"{self.name}: {'not connected: ' if connecting else ''}{error}{shm_note() if suspected else ''}"
        )
        self._error.__cause__ = error
        self._end()

    def _end(self) -> None:
        """Free it. Not by ncclCommDestroy, which comes back only once the peer has ended its side, or its process."""
        self._enter(State.ENDING)
        if self._handle:
            self._ending = Ending(partial(self._library.ncclCommAbort, self._handle), self._lane.device)

    def _enter(self, state: State) -> None:
        self._state = state
        self._deadline = time.monotonic() + self._end_timeout_s

    def _finish(self, stuck: NcclStuckError | None) -> None:
        self._state = State.ENDED
        error = self._why_not()
        self._lane.fail(error, stuck or error)
        for future, _ in self._chores:
            future.set_exception(error)
        self._chores.clear()
        if stuck is not None:
            self._lane.abandon()
            self.ended.set_exception(stuck)
            return
        self._lane.close()
        self.ended.set_result(None)

    def _why_not(self) -> KVFerryError:
        return self._error or NcclPeerError(f"{self.name}: it is {self._state.value}")

    def __repr__(self) -> str:
        return f"<Communicator {self.name}, {self._state.value}>"


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except NcclError as error:
        future.set_exception(error)
    else:
        future.set_result(result)
