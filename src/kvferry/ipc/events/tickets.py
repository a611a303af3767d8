"""Tickets, and which slot of a ring is whose."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from kvferry.errors import DeadlineError, ShareError, WireError

MAX_SLOTS = 4096
MAX_VALUE = 1 << 62

# How often a ring looks again at slots that are given back but whose work has not been reached yet.
_LOOK_AGAIN_S = 0.001


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One recorded event: the slot it is in, and its value, which is never used twice in a ring. Inert, may travel."""

    slot: int
    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.slot < MAX_SLOTS or not 0 < self.value < MAX_VALUE:
            raise ValueError(f"slot {self.slot}, value {self.value}: wanted 0 to {MAX_SLOTS - 1}, 1 to 2**62 - 1")


def check_slot(ticket: Ticket, slots: int) -> None:
    """Refuse a ticket, which may come from a peer, for a slot that the ring does not have.

    Raises
    ------
    WireError
        It has another slot.
    """
    if not 0 <= ticket.slot < slots:
        raise WireError(f"{ticket} is not of this ring, which has slots 0 to {slots - 1}")


def check_slots(slots: int) -> None:
    """Raise ValueError for a number of slots that no ring has."""
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"a ring has 1 to {MAX_SLOTS} slots, got {slots}")


class SlotPool:
    """The slots of a ring: free, or held by the ticket that was recorded last.

    A slot is used again only when its ticket was released and its work has been reached: a signal that is still to
    come can then never overtake a later one in the same slot. Thread-safe; no lock is held while `reached` runs.
    """

    def __init__(self, slots: int) -> None:
        check_slots(slots)
        self.slots = slots
        self._values = [0] * slots  # of the last ticket, 0 before the first
        self._released = deque(range(slots))
        self._held = [False] * slots
        self._pending = [False] * slots  # whether the last ticket's signal may still be to come
        self._next = 1
        self._changed = threading.Condition()
        self._closed = False

    def take(self, reached: Callable[[Ticket], bool], timeout_s: float) -> Ticket:
        """A new ticket in a slot that nobody uses; `reached` says whether an earlier ticket's work is done.

        Raises
        ------
        DeadlineError
            All slots stay in use.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ticket = self._try(reached)
            if ticket is not None:
                return ticket
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineError(
                    f"all {self.slots} events of the ring are still in use after {timeout_s} s: the other process has "
                    "not said that it is done with them. Make the ring larger, or close it if the process is gone"
                )
            with self._changed:
                looked_at = len(self._released) + sum(self._held) < self.slots  # by another thread, which puts it back
                again = self._released or looked_at
                self._changed.wait(min(remaining, _LOOK_AGAIN_S) if again else remaining)

    def _try(self, reached: Callable[[Ticket], bool]) -> Ticket | None:
        for _ in range(self.slots):
            with self._changed:
                if self._closed:
                    raise ShareError("the event ring is closed")
                if not self._released:
                    return None
                slot = self._released.popleft()
                last = Ticket(slot, self._values[slot]) if self._pending[slot] else None
            usable = False
            try:
                usable = last is None or reached(last)
            finally:
                if not usable:
                    with self._changed:
                        self._released.append(slot)
            if not usable:
                continue
            with self._changed:
                self._values[slot] = self._next
                self._held[slot] = self._pending[slot] = True
                self._next += 1
                return Ticket(slot, self._values[slot])
        return None

    def release(self, ticket: Ticket) -> None:
        """The peer is done with `ticket`; idempotent, and harmless for a ticket from before.

        Raises
        ------
        WireError
            No such ticket was ever given.
        """
        check_slot(ticket, self.slots)
        with self._changed:
            if ticket.value > self._values[ticket.slot]:
                raise WireError(f"{ticket} was never recorded: the last in its slot is {self._values[ticket.slot]}")
            if self._held[ticket.slot] and ticket.value == self._values[ticket.slot]:
                self._held[ticket.slot] = False
                self._released.append(ticket.slot)
                self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Take back a ticket whose recording failed: nothing will ever signal it."""
        with self._changed:
            self._pending[ticket.slot] = False
            if self._held[ticket.slot] and ticket.value == self._values[ticket.slot]:
                self._held[ticket.slot] = False
                self._released.append(ticket.slot)
                self._changed.notify()

    def close(self) -> None:
        """Refuse everything from now on, wake who waits. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> int:
        """How many tickets the peer has not given back."""
        with self._changed:
            return sum(self._held)
