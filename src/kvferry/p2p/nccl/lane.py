"""The transfers of one communicator, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from kvferry.cuda.stream import Event, Stream
from kvferry.errors import KVFerryError, NcclError, NcclPeerError
from kvferry.p2p.nccl.library import NCCLLibrary

# (address, nbytes) of device memory.
Range = tuple[int, int]


class Exchange:
    """What goes to the peer and what comes from it in one launch; `future` ends when all of it has."""

    def __init__(self, sends: Sequence[Range], receives: Sequence[Range], deadline: float) -> None:
        # Plain ints: ctypes takes no others, and would refuse them in the launcher's thread only.
        self.sends = tuple((int(address), int(nbytes)) for address, nbytes in sends)
        self.receives = tuple((int(address), int(nbytes)) for address, nbytes in receives)
        self.deadline = deadline
        self.event: Event | None = None  # recorded once the launch is carried out
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # what a peer takes part in cannot be taken back

    def __repr__(self) -> str:
        sent, received = (sum(nbytes for _, nbytes in ranges) for ranges in (self.sends, self.receives))
        return f"<Exchange {sent} bytes out, {received} bytes in>"


class Lane:
    """Exchanges wait, are launched, run, and are done, one after the other, in a stream of their own.

    For the launcher's thread only, with the device's context current.
    """

    def __init__(self, library: NCCLLibrary, device: int, rank: int) -> None:
        self._library = library
        self._peer = 1 - rank
        self._stream = Stream(device)
        self._waiting: deque[Exchange] = deque()
        self._launching: Exchange | None = None
        self._running: deque[Exchange] = deque()
        self._spare: list[Event] = []

    @property
    def device(self) -> int:
        return self._stream.device

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._launching or self._running)

    @property
    def launching(self) -> bool:
        """Whether NCCL is still carrying out a launch, while which the communicator takes no other call."""
        return self._launching is not None

    def add(self, exchange: Exchange) -> None:
        self._waiting.append(exchange)

    def step(self, comm: int, *, depth: int, now: float) -> bool:
        """Go on as far as it goes without waiting; whether anything changed.

        At most `depth` exchanges are with the GPU at once.

        Raises:
            NcclError, CudaError: the communicator is broken, or was too slow for an exchange's deadline.
        """
        if not self.busy:
            return False
        launched = self._library.ncclCommGetAsyncError(comm)  # also while exchanges run: a network may report a loss
        changed = self._retire()
        if self._launching is not None and launched:
            exchange, self._launching = self._launching, None
            self._mark(exchange)
            changed = True
        if self._launching is None and self._waiting and len(self._running) < depth:
            self._launch(comm, self._waiting.popleft())
            changed = True
        self.check_deadlines(now)
        return changed

    def check_deadlines(self, now: float) -> None:
        """Raise NcclPeerError where an exchange is late; one that waits is, if those before it are."""
        for exchange in (*self._running, *([self._launching] if self._launching else []), *self._waiting):
            if now > exchange.deadline:
                raise NcclPeerError(f"{exchange!r} was not done by its deadline")

    def idle(self) -> bool:
        """Whether the GPU is done with all that was launched, well or not."""
        return self._stream.query()

    def fail(self, error: KVFerryError, launched: KVFerryError) -> None:
        """End all exchanges: those that NCCL has seen with `launched`, the others with `error`."""
        seen = [*self._running, *([self._launching] if self._launching else [])]
        unseen = list(self._waiting)
        self._launching = None
        self._running.clear()
        self._waiting.clear()
        for exchange in seen:
            self._free(exchange)
            exchange.future.set_exception(launched)
        for exchange in unseen:
            exchange.future.set_exception(error)

    def close(self) -> None:
        """Give events and stream back; everything in it is done. Idempotent."""
        for event in self._spare:
            event.close()
        self._spare.clear()
        self._stream.close()

    def abandon(self) -> None:
        """Leave stream and events as they are, for ever: the GPU may never be done with them."""
        for owned in (self._stream, *self._spare):
            owned.handle = 0

    def _launch(self, comm: int, exchange: Exchange) -> None:
        library = self._library
        self._launching = exchange
        library.ncclGroupStart()
        refusal: NcclError | None = None
        try:
            for address, nbytes in exchange.sends:
                library.ncclSend(address, nbytes, peer=self._peer, comm=comm, stream=self._stream.handle)
            for address, nbytes in exchange.receives:
                library.ncclRecv(address, nbytes, peer=self._peer, comm=comm, stream=self._stream.handle)
        except NcclError as error:
            refusal = error
        try:
            library.ncclGroupEnd()  # also after a refusal: groups are counted per thread
        except NcclError as error:
            refusal = refusal or error
        if refusal is not None:
            raise refusal

    def _mark(self, exchange: Exchange) -> None:
        """Only now, when the launch is really in the stream, does an event mark its end."""
        self._running.append(exchange)
        exchange.event = self._spare.pop() if self._spare else Event(self._stream.device)
        exchange.event.record(self._stream.handle)

    def _retire(self) -> bool:
        changed = False
        while self._running and self._running[0].event is not None and self._running[0].event.query():
            exchange = self._running.popleft()
            self._free(exchange)
            exchange.future.set_result(None)
            changed = True
        return changed

    def _free(self, exchange: Exchange) -> None:
        if exchange.event is not None:
            self._spare.append(exchange.event)
            exchange.event = None
