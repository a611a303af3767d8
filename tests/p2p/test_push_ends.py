"""The ends of sessions and transfers of the NCCL carrier, where gathers and scatters are still under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.errors import TransferError
from kvferry.p2p.carriers.nccl.carrier import NcclCarrier
from kvferry.p2p.carriers.pushes.inlet import Inlet
from kvferry.p2p.carriers.pushes.outlet import Item, Outlet
from kvferry.p2p.carriers.pushes.ring import Part
from kvferry.p2p.carriers.pushes.slots import Slots
from kvferry.p2p.memory import BlockMemory
from kvferry.p2p.nccl import NcclSettings
from kvferry.p2p.signal.messages import Push


class Told:
    """Hears what a carrier tells, in the order in which it does."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def released(self, number: int) -> None:
        self.said.append(("released", number))

    def item_landed(self, _session: Any, number: int, *items: int) -> None:
        self.said += [("landed", number, item) for item in items]

    def landing_stopped(self, _session: Any, number: int) -> None:
        self.said.append(("stopped", number))

    def carrier_failed(self, _session: Any, error: TransferError) -> None:
        self.said.append(("failed", error.code))


class SlowRing:
    """Copies when it is told to."""

    slot_bytes = 100

    def __init__(self) -> None:
        self.jobs: deque[Callable[[Exception | None], None]] = deque()

    def gather(self, _part: Part, _slot: int, on_done: Callable[[Exception | None], None]) -> None:
        self.jobs.append(on_done)

    scatter = gather


def part() -> Part:
    nothing: Any = None
    return Part(nothing, 0, ((),), 0, 100)


def item(number: int, place: int) -> Item:
    nothing: Any = None
    return Item(number, place, nothing, (), 100)


def test_blocks_are_written_to_the_end_though_the_session_has_ended() -> None:
    """Only then may they be used for something else."""
    told, session = Told(), "session"
    carrier: Any = NcclCarrier(told, lambda *_: None, lambda call: call(), NcclSettings())
    ring: Any = SlowRing()
    inlet: Any = Inlet(
        ring,
        Slots([1, 2]),
        lambda _: None,
        lambda call: call(),
        lambda number, *items: told.item_landed(session, number, *items),
        lambda number: told.landing_stopped(session, number),
        lambda _: None,
    )
    carrier._inlets[session] = inlet
    slot = inlet.slots.take(inlet)
    inlet.writing[5] += 1
    ring.scatter(
        part(), slot, lambda error: inlet._scattered(Push(number=5, item=0, begin=0, end=100), slot, 100, error)
    )
    carrier.session_lost(session)
    carrier.stop_landing(session, 5)
    assert told.said == []
    carrier.stop_landing(session, 6)  # of which nothing was under way
    assert told.said == [("stopped", 6)]
    ring.jobs.popleft()(None)
    assert told.said == [("stopped", 6), ("stopped", 5)]
    carrier.session_lost("another")
    assert carrier._inlets == {}


def test_blocks_are_read_to_the_end_though_the_transfer_has_ended() -> None:
    told = Told()
    ring: Any = SlowRing()
    lane: Any = object()
    pushed: list[Any] = []
    outlet = Outlet(ring, Slots([1, 2]), pushed.append, lambda call: call(), told.released, lambda _: None, lane)
    outlet.queue.extend([item(5, 0), item(6, 0), item(5, 1)])
    outlet.pump()
    assert len(ring.jobs) == 2
    outlet.stop(5)
    assert told.said == []
    ring.jobs.popleft()(None)
    assert told.said == [("released", 5)]
    assert [message.number for message in pushed] == [5]  # it is in a slot, so it may go
    outlet.stop(7)  # of which nothing was ever read
    assert told.said == [("released", 5), ("released", 7)]
    ring.jobs.popleft()(None)
    outlet.stop(6)
    assert told.said[-1] == ("released", 6)
    assert not outlet.queue


def test_items_that_fit_go_as_one_part() -> None:
    """Layers of one transfer, in their order; what is larger than a slot goes alone, in parts."""
    memory: Any = BlockMemory(Any, np.arange(1))  # type: ignore[arg-type]
    ring: Any = SlowRing()
    lane: Any = object()
    pushed: list[Any] = []
    outlet = Outlet(ring, Slots(range(20)), pushed.append, lambda call: call(), Told().released, lambda _: None, lane)
    sizes = [40, 40, 30, 250, 10]
    outlet.queue.extend(Item(1, place, memory, (), nbytes) for place, nbytes in enumerate(sizes))
    outlet.queue.append(Item(2, 5, memory, (), 10))
    outlet.pump()
    while ring.jobs:
        ring.jobs.popleft()(None)
    found = [(push.number, push.item, push.items, push.begin, push.end) for push in pushed]
    assert found == [
        (1, 0, 2, 0, 80),
        (1, 2, 1, 0, 30),
        (1, 3, 1, 0, 100),
        (1, 3, 1, 100, 200),
        (1, 3, 1, 200, 250),
        (1, 4, 1, 0, 10),
        (2, 5, 1, 0, 10),
    ]
