"""The two ends of a ring of events: the process that records, and the process that asks and waits."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvferry.errors import DeadlineError, ShareError
from kvferry.ipc.events.gate import Gate
from kvferry.ipc.events.tickets import SlotPool, Ticket, check_slot

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from kvferry.ipc.events.descriptor import EventsDescriptor

_FIRST_POLL_S = 20e-6
_LONGEST_POLL_S = 1e-3
# How long `close` waits for calls of other threads, none of which blocks for long once it has begun.
_CLOSE_TIMEOUT_S = 10.0


class EventRing(ABC):
    """The recording end: a fixed number of events, exported once, each kept until the peer is done with it or dead.

    `record` gives a ticket, which the caller sends to the peer by its own means; the peer's answer comes back to
    `release`, or the peer is dead and the ring is closed. Until then the event lives and its slot is not used again.
    """

    def __init__(self, slots: int) -> None:
        self._pool = SlotPool(slots)
        self._gate = Gate()

    @property
    def slots(self) -> int:
        return self._pool.slots

    @property
    @abstractmethod
    def descriptor(self) -> EventsDescriptor:
        """What the peer opens the ring with; see `encode_events`."""

    @abstractmethod
    def _signal(self, ticket: Ticket, stream: int) -> None:
        """Make the ticket's event happen once all work that `stream` has now is done."""

    @abstractmethod
    def reached(self, ticket: Ticket) -> bool:
        """Whether the work before a ticket of this ring, not released yet, is done; never blocks."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what the ring holds; called once."""

    def record(self, stream: int | None = None, timeout_s: float = 5.0) -> Ticket:
        """A ticket for the end of the work that `stream` has now; None is the default stream.

        On the host there are no streams: there the work before the call is done, and so is the event.
        Blocks, at most `timeout_s`, while all slots are in use.

        Raises
        ------
        DeadlineError
            All slots stayed in use.
        """
        with self._gate:
            ticket = self._pool.take(self.reached, timeout_s)
            try:
                self._signal(ticket, stream or 0)
            except BaseException:
                self._pool.cancel(ticket)
                raise
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The peer is done with `ticket` (and with all that it did after waiting for it); idempotent.

        Raises
        ------
        WireError
            The ring never gave that ticket.
        """
        self._pool.release(ticket)

    @property
    def in_use(self) -> int:
        """How many tickets the peer has not given back."""
        return self._pool.in_use

    @property
    def closed(self) -> bool:
        return self._pool.closed

    def close(self) -> None:
        """End the ring: the peer is done with all of it, or dead; idempotent. Signals under way still land.

        Raises
        ------
        DeadlineError
            Calls of other threads did not end; what the ring holds is given back by a later `close`.
        """
        self._pool.close()
        if self._gate.last_one_out(_CLOSE_TIMEOUT_S):
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.slots}, {self.in_use} in use>"


class PeerEvents(ABC):
    """The waiting end of another process's ring.

    `wait` polls on the host and has a deadline. `wait_on_stream` holds a stream of this process, and exists only where
    this process can end the wait by itself (`abandon`), should the peer die before it signals.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._lock = threading.Lock()
        self._gate = Gate()
        self._ended = ""  # why nothing can be asked any more

    @abstractmethod
    def _reached(self, ticket: Ticket) -> bool:
        """Whether the peer has come to `ticket`; never blocks."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what was opened; called once."""

    def query(self, ticket: Ticket) -> bool:
        """Whether the work before `ticket` is done; never blocks.

        Raises
        ------
        WireError
            The ring has no such slot.
        ShareError
            The events are closed or abandoned: nothing more will be known of them.
        """
        with self._gate:
            self._check(ticket)
            return self._reached(ticket)

    def wait(self, ticket: Ticket, timeout_s: float) -> None:
        """Block, polling on the host, until the work before `ticket` is done.

        Raises
        ------
        DeadlineError
            It was not, after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_POLL_S
        while not self.query(ticket):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineError(f"the other process did not come to {ticket} within {timeout_s} s")
            time.sleep(min(pause, remaining))
            pause = min(pause * 2, _LONGEST_POLL_S)

    def wait_on_stream(self, ticket: Ticket, stream: int | None = None) -> None:
        """Hold `stream` (None: the default one) until the work before `ticket` is done; does not block the host.

        Whoever calls this watches the peer, and calls `abandon` when it dies.

        Raises
        ------
        ShareError
            This process could not end that wait by itself if the peer died: use `wait`.
        """
        self._check(ticket)
        raise ShareError(
            f"{type(self).__name__} cannot hold a stream: if the peer died before it signals, the stream would hang "
            "for ever. Use wait(), or timeline semaphores (isolated_ipc)"
        )

    def abandon(self) -> None:
        """The peer is dead: let go all streams of this process that wait for it, and fail every later question."""
        self._end("the other process died before it signalled: its events were abandoned")

    def close(self) -> None:
        """Give back what was opened; idempotent. No stream may still be waiting.

        Raises
        ------
        DeadlineError
            Calls of other threads did not end; a later `close` gives back what was opened.
        """
        with self._lock:
            self._ended = _CLOSED
        if self._gate.last_one_out(_CLOSE_TIMEOUT_S):
            self._close()

    @property
    def closed(self) -> bool:
        return self._ended == _CLOSED

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why

    def _check(self, ticket: Ticket) -> None:
        if self._ended:
            raise ShareError(self._ended)
        check_slot(ticket, self.slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.slots}, {self._ended or 'open'}>"


_CLOSED = "the events are closed"
