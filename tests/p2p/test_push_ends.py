"""What becomes of runs that are under way when their transfer, or session, ends; and how they are made."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvferry.errors import NcclPeerError, NcclStuckError, ProtocolError, TransferError
from kvferry.p2p.carriers.nccl.carrier import NcclCarrier
from kvferry.p2p.carriers.pushes.buffers import Buffer, Buffers
from kvferry.p2p.carriers.pushes.inlet import Expected, Inlet
from kvferry.p2p.carriers.pushes.outlet import GO_S, Item, Outlet
from kvferry.p2p.carriers.pushes.run import Part, Run
from kvferry.p2p.memory import BlockMemory
from kvferry.p2p.nccl import NcclSettings
from kvferry.p2p.signal.messages import About, Go, NcclNew, Push

SLOT = 100
GO = Go(part_bytes=SLOT)
MEMORY: Any = BlockMemory(Any, np.arange(1))  # type: ignore[arg-type]


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


class Slow:
    """Copies, and exchanges of a lane, that end when they are told to."""

    def __init__(self) -> None:
        self.copies: deque[tuple[Part, Callable[[Exception | None], None]]] = deque()
        self.exchanges: deque[Future[None]] = deque()
        self.aborted = ""
        self.refuses = False

    def prepare(self, run: Run) -> None:
        """Nothing."""

    def copy(self, part: Part, _slot: int, on_done: Callable[[Exception | None], None], *, to_flat: bool) -> None:
        del to_flat
        if self.refuses:
            raise ValueError("not so")
        self.copies.append((part, on_done))

    def exchange(self, **_ranges: Any) -> Future[None]:
        future: Future[None] = Future()
        self.exchanges.append(future)
        if self.aborted:
            future.set_exception(NcclPeerError(self.aborted))
        return future

    def call(self, task: Callable[[], None]) -> None:
        task()

    def abort(self, reason: str) -> Future[None]:
        self.aborted = reason
        while self.exchanges:
            self.exchanges.popleft().set_exception(NcclPeerError(reason))
        return Future()

    def end_copy(self, error: Exception | None = None) -> Part:
        part, on_done = self.copies.popleft()
        on_done(error)
        return part

    def end_exchange(self, error: Exception | None = None) -> None:
        future = self.exchanges.popleft()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def end_all(self) -> None:
        while self.copies or self.exchanges:
            if self.copies:
                self.end_copy()
            if self.exchanges:
                self.end_exchange()


class Ends:
    """An outlet and an inlet, each with one buffer of two slots."""

    def __init__(self) -> None:
        self.told = told = Told()
        self.slow = slow = Slow()
        self.messages: list[Any] = []
        self.failures: list[Exception] = []
        self.buffers = [Buffers([Buffer((1, 2), SLOT, slow)]) for _ in range(2)]
        common = (self.messages.append, lambda call: call())
        self.outlet = Outlet(self.buffers[0], *common, told.released, self.failures.append)
        self.inlet = Inlet(
            self.buffers[1],
            *common,
            lambda number, *items: told.item_landed(None, number, *items),
            lambda number: told.landing_stopped(None, number),
            self.failures.append,
        )
        self.outlet.connect(slow)
        self.inlet.connect(slow)

    def expect(self, number: int, *sizes: int) -> None:
        self.inlet.expected[number] = Expected(MEMORY, lambda _: (), sizes)

    def go_on(self, outlet: Outlet) -> None:
        """As long as anything is pushed."""
        while outlet._pushed:
            outlet.go(GO)
            self.slow.end_all()

    def all_buffers_are_back(self) -> bool:
        class Other:
            def pump(self) -> None:
                """Nothing."""

        return all(buffers.take(Other()) is not None for buffers in self.buffers)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def item(number: int, place: int, nbytes: int = SLOT) -> Item:
    return Item(number, place, MEMORY, (), nbytes)


def push(number: int, place: int, nbytes: int, items: int = 1, part_bytes: int = SLOT) -> Push:
    return Push(number=number, item=place, items=items, nbytes=nbytes, part_bytes=part_bytes)


def test_items_that_follow_each_other_go_as_one_run(ends: Ends) -> None:
    """Of one transfer, in their order, up to some slots; what is larger goes alone. Two runs are agreed on at once."""
    sizes = [40, 40, 30, 5000, 10]
    ends.outlet.queue.extend(item(1, place, nbytes) for place, nbytes in enumerate(sizes))
    ends.outlet.queue.append(item(2, 5, 10))
    ends.outlet.queue.append(item(2, 7, 10))
    ends.outlet.pump()
    assert len(ends.messages) == 2
    ends.go_on(ends.outlet)
    assert ends.messages == [
        push(1, 0, 110, items=3),
        push(1, 3, 5000),
        push(1, 4, 10),
        push(2, 5, 10),
        push(2, 7, 10),
    ]
    assert ends.all_buffers_are_back()
    with pytest.raises(ProtocolError, match="nothing that was pushed"):
        ends.outlet.go(GO)


def test_parts_go_in_their_order_and_as_far_ahead_as_there_are_slots(ends: Ends) -> None:
    ends.outlet.queue.extend([item(1, 0, 250), item(1, 1, 100)])
    ends.outlet.pump()
    ends.outlet.go(GO)
    parts = []
    while ends.slow.copies or ends.slow.exchanges:
        assert len(ends.slow.copies) + len(ends.slow.exchanges) <= 2
        if ends.slow.copies:
            part = ends.slow.end_copy()
            parts.append((part.begin, part.end))
        else:
            ends.slow.end_exchange()
    assert parts == [(0, 100), (100, 200), (200, 300), (300, 350)]


def test_blocks_are_read_to_the_end_though_the_transfer_has_ended(ends: Ends) -> None:
    """What the peer was told of comes, as it is; what was only queued does not."""
    ends.outlet.queue.extend([item(5, 0), item(6, 0), item(5, 1)])
    ends.outlet.pump()
    ends.outlet.go(GO)
    ends.outlet.stop(5)
    assert ends.told.said == []
    assert [each.number for each in ends.outlet.queue] == []
    ends.slow.end_all()
    assert ends.told.said == [("released", 5)]
    ends.outlet.stop(7)  # of which nothing was ever read
    assert ends.told.said == [("released", 5), ("released", 7)]
    ends.outlet.stop(6)
    ends.outlet.go(GO)
    ends.slow.end_all()
    assert ends.told.said[-1] == ("released", 6)
    assert ends.all_buffers_are_back()


def test_blocks_are_read_to_the_end_though_the_session_has_ended(ends: Ends) -> None:
    ends.outlet.queue.extend([item(5, 0, 300), item(6, 0), item(7, 0)])
    ends.outlet.pump()
    ends.outlet.go(GO)
    ends.outlet.end("the session has ended")
    for number in (5, 6, 7):
        ends.outlet.stop(number)
    assert ends.told.said == [("released", 6), ("released", 7)]  # pushed, or not even that
    ends.slow.end_copy()
    assert ("released", 5) not in ends.told.said
    ends.slow.end_copy()
    assert ends.told.said[-1] == ("released", 5)
    assert not ends.slow.copies
    assert ends.failures == []
    assert ends.all_buffers_are_back()


def test_blocks_are_written_to_the_end_though_the_session_has_ended(ends: Ends) -> None:
    """Only then may they be used for something else."""
    carrier: Any = NcclCarrier(ends.told, lambda *_: None, lambda call: call(), NcclSettings())
    carrier._inlets["session"] = ends.inlet
    ends.expect(5, 200)
    ends.inlet.push(push(5, 0, 200))
    ends.slow.end_exchange()
    carrier.session_lost("session")
    carrier.stop_landing("session", 5)
    assert ends.told.said == []
    carrier.stop_landing("session", 6)  # of which nothing was under way
    assert ends.told.said == [("stopped", 6)]
    carrier.session_lost("another")
    assert carrier._inlets
    ends.slow.end_copy()
    assert ends.told.said == [("stopped", 6), ("stopped", 5)]
    carrier.session_lost("another")
    assert carrier._inlets == {}
    assert ends.all_buffers_are_back()


def test_what_is_not_wanted_any_more_is_dropped(ends: Ends) -> None:
    """It is received all the same: the peer sends it. What comes behind it lands."""
    ends.expect(5, 100, 100)
    ends.expect(6, 30)
    ends.inlet.push(push(5, 0, 200, items=2))
    ends.inlet.push(push(6, 0, 30))
    ends.slow.end_exchange()
    ends.inlet.stop(5)
    assert ends.told.said == []  # it is being written
    ends.slow.end_copy()
    assert ends.told.said == [("stopped", 5)]
    ends.slow.end_all()
    assert ends.told.said == [("stopped", 5), ("landed", 6, 0)]
    assert ends.all_buffers_are_back()


def test_items_land_one_by_one(ends: Ends) -> None:
    ends.expect(5, 30, 0, 150, 20, 0)
    ends.inlet.push(push(5, 0, 200, items=4))
    ends.inlet.push(push(5, 4, 0))
    assert ends.told.said == [("landed", 5, 4)]
    ends.slow.end_exchange()
    ends.slow.end_copy()
    assert ends.told.said[1:] == [("landed", 5, 0), ("landed", 5, 1)]
    ends.slow.end_all()
    assert ends.told.said[3:] == [("landed", 5, 2), ("landed", 5, 3)]
    assert not ends.inlet.expected


@pytest.mark.parametrize(
    "message", [push(5, 0, 31), push(5, 0, 30, items=2), push(5, 1, 30), push(5, 0, 0), push(5, 3, 10)]
)
def test_pushes_that_are_not_what_was_to_come(ends: Ends, message: Push) -> None:
    ends.expect(5, 30, 40)
    with pytest.raises(ProtocolError):
        ends.inlet.push(message)
    assert not ends.slow.exchanges


def test_the_same_item_twice(ends: Ends) -> None:
    ends.expect(5, 30, 40)
    ends.inlet.push(push(5, 0, 30))
    with pytest.raises(ProtocolError, match="to come"):
        ends.inlet.push(push(5, 0, 30))


def test_more_runs_than_a_peer_may_have(ends: Ends) -> None:
    """Some may be sent and not yet written; of the others two."""
    ends.expect(5, *[10] * 7)
    for place in range(6):
        ends.inlet.push(push(5, place, 10))
    assert len(ends.messages) == 4
    with pytest.raises(ProtocolError, match="more than 2"):
        ends.inlet.push(push(5, 6, 10))
    ends.slow.end_all()
    assert len(ends.messages) == 6
    assert ends.told.said == [("landed", 5, place) for place in range(6)]


@pytest.mark.parametrize("fails", ["copy", "exchange"])
def test_a_failure_ends_all_and_leaves_nothing(ends: Ends, fails: str) -> None:
    ends.outlet.queue.extend([item(1, 0, 300), item(2, 0)])
    ends.outlet.pump()
    ends.outlet.go(GO)
    ends.outlet.go(GO)
    if fails == "exchange":
        ends.slow.end_copy()
        ends.slow.end_exchange(NcclPeerError("it is gone"))
    else:
        ends.slow.end_copy(RuntimeError("it is broken"))
    assert ends.failures == []  # the other slot is still being filled
    ends.slow.end_copy()
    assert len(ends.failures) == 2
    assert not ends.slow.copies
    assert not ends.slow.exchanges
    for number in (1, 2):
        ends.outlet.stop(number)
    assert ends.told.said == [("released", 1), ("released", 2)]
    assert ends.all_buffers_are_back()


def test_a_slot_that_the_gpu_never_ends_with(ends: Ends) -> None:
    """The whole buffer is lost; where that was the last nobody waits for one."""
    ends.expect(5, 300)
    ends.inlet.push(push(5, 0, 300))
    ends.slow.end_exchange(NcclStuckError("it is stuck"))
    ends.slow.end_exchange(NcclPeerError("it is gone"))
    assert [type(error) for error in ends.failures] == [NcclStuckError]
    ends.expect(6, 10)
    ends.inlet.push(push(6, 0, 10))
    assert isinstance(ends.failures[-1], TransferError)
    assert "restart" in str(ends.failures[-1])


def test_who_waits_for_a_buffer_gets_it_after_the_runs_that_are_agreed_on(ends: Ends) -> None:
    other = Outlet(ends.buffers[0], ends.messages.append, lambda call: call(), ends.told.released, ends.failures.append)
    other.connect(ends.slow)
    ends.outlet.queue.extend(item(1, place, 1600) for place in range(4))
    ends.outlet.pump()
    other.queue.append(item(2, 0))
    other.pump()
    assert [message.number for message in ends.messages] == [1, 1]
    ends.go_on(ends.outlet)
    assert [message.number for message in ends.messages] == [1, 1, 2]
    ends.go_on(other)
    assert [message.number for message in ends.messages] == [1, 1, 2, 1, 1]


def test_parts_are_as_large_as_the_smaller_slot(ends: Ends) -> None:
    """Of either side; a peer that wants larger ones is refused."""
    ends.expect(5, 90)
    ends.inlet.push(push(5, 0, 90, part_bytes=30))
    assert ends.messages == [Go(part_bytes=30)]
    assert len(ends.slow.exchanges) == 2
    ends.slow.end_all()
    ends.expect(6, 90)
    ends.inlet.push(push(6, 0, 90, part_bytes=4 * SLOT))
    assert ends.messages[1:] == [GO]
    ends.slow.end_all()
    ends.outlet.queue.append(item(1, 0, 90))
    ends.outlet.pump()
    with pytest.raises(ProtocolError, match="slots have"):
        ends.outlet.go(Go(part_bytes=SLOT + 1))
    ends.outlet.go(Go(part_bytes=45))
    assert [part.nbytes for part, _ in ends.slow.copies] == [45, 45]


def test_an_item_of_which_a_part_was_not_written_has_not_landed(ends: Ends) -> None:
    """Though its last part was."""
    ends.expect(5, 200)
    ends.inlet.push(push(5, 0, 200))
    ends.slow.end_exchange()
    ends.slow.end_exchange()
    ends.slow.end_copy(RuntimeError("it is broken"))
    ends.slow.end_copy()
    assert ends.told.said == []
    assert len(ends.failures) == 1
    assert ends.all_buffers_are_back()


@pytest.mark.parametrize("sends", [True, False])
def test_copies_that_cannot_even_be_started(ends: Ends, sends: bool) -> None:
    """Whatever is wrong with them, the session ends and nobody waits."""
    ends.slow.refuses = True
    if sends:
        ends.outlet.queue.append(item(1, 0, 300))
        ends.outlet.pump()
        ends.outlet.go(GO)
    else:
        ends.expect(1, 300)
        ends.inlet.push(push(1, 0, 300))
        ends.slow.end_exchange()
        ends.slow.end_exchange()
    assert [str(error) for error in ends.failures] == ["not so"]
    assert ends.all_buffers_are_back()


def test_nothing_is_kept_of_transfers_that_are_over(ends: Ends) -> None:
    for number in range(1, 20):
        ends.expect(number, 150)
        ends.inlet.push(push(number, 0, 150))
        if number % 3 == 0:
            ends.inlet.stop(number)
        ends.outlet.queue.append(item(number, 0))
        ends.outlet.pump()
        ends.outlet.go(GO)
        ends.slow.end_all()
        ends.outlet.stop(number)
    assert ends.inlet._pipe is not None
    for kept in (ends.inlet.expected, ends.inlet._pipe._writing, ends.outlet.reading):
        assert not kept


def test_a_peer_that_begins_nothing_is_late(ends: Ends) -> None:
    """It would keep a buffer, and the blocks, for ever."""
    soon, late = time.monotonic() + GO_S / 2, time.monotonic() + GO_S + 60
    assert not ends.outlet.is_late(math.inf)
    ends.outlet.queue.extend([item(1, 0), item(2, 0)])
    ends.outlet.pump()
    assert not ends.outlet.is_late(soon)
    assert ends.outlet.is_late(late)
    ends.outlet.go(GO)
    assert ends.outlet.is_late(late)
    ends.outlet.go(GO)
    assert not ends.outlet.is_late(late)
    carrier: Any = NcclCarrier(ends.told, lambda *_: None, lambda call: call(), NcclSettings())
    carrier._outlets["session"] = ends.outlet
    ends.outlet.queue.append(item(3, 0))
    ends.slow.end_all()
    carrier.tick(soon)
    assert ends.told.said == []
    carrier.tick(late)
    assert ends.told.said == [("failed", "nccl")]


def test_the_session_ends_when_the_peer_is_told(ends: Ends) -> None:
    """It takes no messages any more. Who waits for the buffer gets it."""
    other = Outlet(ends.buffers[0], ends.messages.append, lambda call: call(), ends.told.released, ends.failures.append)
    other.connect(ends.slow)
    ends.outlet.tell = lambda _: ends.outlet.end("it takes no messages")
    ends.outlet.queue.append(item(1, 0))
    ends.outlet.pump()
    other.queue.append(item(2, 0))
    other.pump()
    assert ends.messages == [push(2, 0, SLOT)]
    ends.outlet.stop(1)
    assert ends.told.said == [("released", 1)]


def test_nothing_begins_over_a_session_that_has_ended() -> None:
    peer, told = Peer(), Told()
    peer.ended = True
    carrier: Any = NcclCarrier(told, lambda *_: None, lambda call: call(), NcclSettings())
    carrier.start_item(peer, 5, 0, MEMORY)
    assert carrier.heard(peer, push(5, 0, 10))
    carrier.stop_source(peer, 5)
    carrier.stop_landing(peer, 5)
    assert told.said == [("released", 5), ("stopped", 5)]
    for kept in (carrier._outlets, carrier._inlets, carrier._by_number):
        assert not kept


class Peer:
    """A session, as far as it is looked at."""

    ended = False
    about: Any = About(address="", host_id="", device_uuid="", tp_rank=0, tp_size=1, carriers=("nccl",), geometry=None)


def test_a_peer_that_makes_a_second_communicator() -> None:
    """Also while the first is not connected yet: there is only room for some."""
    made: list[Future[Any]] = []

    class Launcher:
        def connect(self, *_: Any, **__: Any) -> Future[Any]:
            made.append(Future())
            return made[-1]

    told, peer = Told(), Peer()
    carrier: Any = NcclCarrier(told, lambda *_: None, lambda call: call(), NcclSettings())
    carrier._launcher = Launcher()
    new = NcclNew(unique_id=bytes(128), max_ctas=NcclSettings().max_ctas)
    assert carrier.heard(peer, new)
    assert not carrier.heard(peer, new)
    assert len(made) == 1
    assert told.said == [("failed", "nccl")]
    carrier.session_lost(peer)
    assert not carrier._joined
