"""What callers' threads leave for the loop to do."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvferry.errors import TransferError
from kvferry.p2p.assembly import Parts
from kvferry.p2p.futures import Sending
from kvferry.p2p.memory import Memory
from kvferry.p2p.receive.store import Place
from kvferry.p2p.signal.messages import Offer
from kvferry.p2p.streams import Event, Use
from kvferry.p2p.transfers.outgoing_records import Outgoing, OutKey

Call = Callable[[], None]


class Posts:
    """For any thread: nothing here waits."""

    def __init__(self, parts: Parts, *, lease_s: float) -> None:
        self._parts = parts
        self._lease_s = lease_s
        self._numbers = itertools.count(1)

    def until(self, timeout_s: float | None = None) -> float:
        """When so much time has passed, by default a lease's."""
        return time.monotonic() + (self._lease_s if timeout_s is None else timeout_s)

    def post(self, call: Call) -> None:
        """Have the loop call it. Raises TransferError ("closed")."""
        self._parts.loop.post(call)

    def quietly(self, *calls: Call) -> None:
        """The same for what has no sense any more once the engine is closed."""
        for call in calls:
            with contextlib.suppress(TransferError):
                self._parts.loop.post(call)

    def give_back(self, place: Place, use: Use) -> None:
        """Nobody has a view of it any more."""
        self.quietly(partial(self._parts.core.give_back, place, use))

    def send(self, sending: Sending, offer: Offer, memory: Memory, *, targets: Sequence[str | int]) -> list[int]:
        """Send one thing to one or several, item by item as they become `ready`; the numbers of the transfers."""
        numbers = []
        core = self._parts.core
        for target in targets:
            number = next(self._numbers)
            numbers.append(number)
            out = Outgoing(
                key=OutKey(offer.transfer_id, target),
                number=number,
                offer=msgspec.structs.replace(offer, number=number),
                lease_ends_at=self.until(),
                done=sending.part_ended,
                ready=set(),
            )
            address = target if isinstance(target, str) else None
            self.post(partial(core.send, out, memory, address))
        sending.on_cancel(partial(self.quietly, *(partial(core.cancel_sending, number) for number in numbers)))
        return numbers

    def ready(self, numbers: Sequence[int], items: Sequence[int], *, event: Event | None) -> None:
        """The source bytes of some items are there once the event is done."""
        core = self._parts.core
        for number in numbers:
            self.quietly(partial(core.when_done, event, partial(core.items_ready, number, items)))
