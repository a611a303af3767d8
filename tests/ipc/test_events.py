"""Rings of events: slots, tickets, the three back ends between real processes (CUDA by the driver's double)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from doubles.event_side import EventChild, EventSide
from doubles.fake_cuda import FakeDriver, installed
from doubles.host_files import count_fds
from kvferry.cuda.device import bound
from kvferry.errors import CudaError, DeadlineError, ShareError, StaleHandleError, WireError
from kvferry.ipc.events import Ticket, encode_events, make_event_ring, open_events
from kvferry.ipc.events.tickets import SlotPool
from kvferry.ipc.table import process_table

RINGS = {"cuda": {}, "semaphore": {"isolated": True}, "in device memory": {"isolated": True, "in_device_memory": True}}


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver
        process_table().mappings.drain(20)


@pytest.fixture(scope="module")
def children() -> Iterator[list[EventChild]]:
    """The process that the last test left in good order, if any."""
    left: list[EventChild] = []
    yield left
    for process in left:
        process.close()


@pytest.fixture
def child(children: list[EventChild]) -> Iterator[EventChild]:
    """A process for tests that leave it alive. One that died or lost step fails its own test, never the next one."""
    process = children.pop() if children else EventChild(fake=True)
    try:
        yield process
        assert process.call("close")["mapped"] == 0
        children.append(process)
    finally:
        if process not in children:
            process.kill()
            process.close()


@pytest.fixture
def mortal() -> Iterator[EventChild]:
    """A process for one test, which may kill it."""
    process = EventChild(fake=True)
    with process:
        yield process


@pytest.fixture
def side(fake: FakeDriver, child: EventChild) -> Iterator[EventSide]:
    ours = EventSide(child.sock)
    yield ours
    ours.close()


@pytest.fixture
def survivor(fake: FakeDriver, mortal: EventChild) -> Iterator[EventSide]:
    """This process, beside one that may be killed."""
    mortal.call("start")
    ours = EventSide(mortal.sock)
    ours.start()
    yield ours
    assert ours.close()["mapped"] == 0


def test_a_slot_is_used_again_only_when_released_and_reached() -> None:
    reached: set[Ticket] = set()
    pool = SlotPool(2)
    first, second = (pool.take(reached.__contains__, 0) for _ in range(2))
    assert {first.slot, second.slot} == {0, 1}
    with pytest.raises(DeadlineError, match="all 2 events"):
        pool.take(reached.__contains__, 0.05)
    reached.add(first)
    with pytest.raises(DeadlineError):  # reached, but the peer is not done with it
        pool.take(reached.__contains__, 0.05)
    pool.release(second)
    with pytest.raises(DeadlineError):  # given back, but its signal is still to come
        pool.take(reached.__contains__, 0.05)
    pool.release(first)
    third = pool.take(reached.__contains__, 0)
    assert third.slot == first.slot
    assert third.value > max(first.value, second.value)
    assert pool.in_use == 1


def test_release_is_idempotent_and_never_frees_a_later_ticket() -> None:
    pool = SlotPool(1)
    old = pool.take(lambda _: True, 0)
    pool.release(old)
    pool.release(old)
    new = pool.take(lambda _: True, 0)
    pool.release(old)
    assert pool.in_use == 1
    with pytest.raises(DeadlineError):
        pool.take(lambda _: True, 0.01)
    pool.release(new)
    assert pool.in_use == 0
    with pytest.raises(WireError, match="never recorded"):
        pool.release(Ticket(0, new.value + 1))
    with pytest.raises(WireError, match="slots 0 to 0"):
        pool.release(Ticket(1, 1))


def test_a_ring_that_waits_for_a_slot_gets_it_or_is_told_that_the_ring_closed() -> None:
    pool = SlotPool(1)
    ticket = pool.take(lambda _: True, 0)
    timer = threading.Timer(0.1, pool.release, [ticket])
    timer.start()
    assert pool.take(lambda _: True, 5).value > ticket.value
    timer.join()
    timer = threading.Timer(0.1, pool.close)
    timer.start()
    with pytest.raises(ShareError, match="closed"):
        pool.take(lambda _: True, 5)
    timer.join()


@pytest.mark.parametrize(("slot", "value"), [(-1, 1), (4096, 1), (0, 0), (0, -1), (0, 1 << 62)])
def test_a_ticket_has_a_sane_slot_and_value(slot: int, value: int) -> None:
    with pytest.raises(ValueError):
        Ticket(slot, value)


def test_host_events_in_one_process() -> None:
    before = count_fds()
    with make_event_ring(None, False, 4) as ring, open_events(*encode_events(ring)) as events:
        assert not events.query(Ticket(0, 1))
        ticket = ring.record()
        assert events.query(ticket)
        events.wait(ticket, 0)
        assert not events.query(Ticket(ticket.slot, ticket.value + 1))
        with pytest.raises(DeadlineError, match="within"):
            events.wait(Ticket(ticket.slot, ticket.value + 1), 0.05)
        for bad in (4, 4095):
            with pytest.raises(WireError, match="slots 0 to 3"):
                events.query(Ticket(bad, 1))
        with pytest.raises(ShareError, match="hold a stream"):
            events.wait_on_stream(ticket)
        events.abandon()
        with pytest.raises(ShareError, match="died"):
            events.query(ticket)
    with pytest.raises(ShareError, match="closed"):
        events.query(ticket)
    with pytest.raises(ShareError, match="closed"):
        ring.record()
    ring.close()
    events.close()
    del ring, events
    process_table().mappings.drain()
    assert count_fds() == before


def test_close_wakes_a_waiter() -> None:
    with make_event_ring(None, False) as ring, open_events(*encode_events(ring)) as events:
        timer = threading.Timer(0.1, events.close)
        timer.start()
        with pytest.raises(ShareError, match="closed"):
            events.wait(Ticket(0, 1), 10)
        timer.join()


def test_host_events_between_processes(child: EventChild) -> None:
    data = child.call("make", host=True, slots=2)["data"]
    side = EventSide(child.sock)
    assert side.open(data)["kind"] == "HostPeerEvents"
    tickets = [child.call("record")["ticket"] for _ in range(2)]
    assert all(side.query(ticket)["reached"] for ticket in tickets)
    with pytest.raises(Exception, match="still in use"):
        child.call("record", within_s=0.05)
    child.call("release", ticket=tickets[1])
    child.call("close")
    assert side.query(tickets[0])["reached"]  # the page outlives its maker
    assert side.close()["mapped"] == 0


@pytest.mark.parametrize("kind", RINGS)
def test_ordered_after_a_spin_in_both_directions(side: EventSide, child: EventChild, kind: str) -> None:
    child.call("start")
    side.start()
    data = child.call("make", **RINGS[kind])["data"]
    assert side.open(data)["kind"] == ("CudaPeerEvents" if kind == "cuda" else "SemaphorePeerEvents")
    child.ask("send_buffer")
    side.receive_buffer()
    child.answer()
    ticket = child.call("work", spin_s=1.0)["ticket"]
    assert not side.query(ticket)["reached"]
    assert side.read()["bytes"] == [0, 0]
    child.call("churn", number=50)
    side.wait(ticket, 10)
    assert side.read()["bytes"] == [7, 7]
    child.call("release", ticket=ticket)
    with pytest.raises(DeadlineError):
        side.wait(child.call("work", spin_s=0.5)["ticket"], 0.05)


@pytest.mark.parametrize("kind", RINGS)
def test_this_process_records_and_the_other_opens_late(side: EventSide, child: EventChild, kind: str) -> None:
    side.start()
    child.call("start")
    child.ask("receive_buffer")
    side.send_buffer()
    child.answer()
    data = side.make(**RINGS[kind])["data"]
    ticket = side.work(0.2)["ticket"]
    side.churn(50)
    time.sleep(0.5)
    child.call("open", data=data)
    child.call("wait", ticket=ticket, within_s=5)
    assert child.call("read")["bytes"] == [7, 7]
    side.release(ticket)


def test_a_ring_in_device_memory_needs_no_descriptor_and_no_slot_is_used_too_early(fake: FakeDriver) -> None:
    with make_event_ring(0, True, 1, in_device_memory=True) as ring:
        data, fds = encode_events(ring)
        assert fds == []
        with open_events(data) as events:
            stuck = threading.Event()
            with bound(0):
                stream = fake.fake.stream(0)
            stream.push(partial(stream.hold_until, stuck.is_set))
            ticket = ring.record()
            ring.release(ticket)
            assert not events.query(ticket)
            with pytest.raises(DeadlineError):  # its signal is still to come
                ring.record(timeout_s=0.05)
            with pytest.raises(ShareError, match="cannot hold a stream"):  # the recorder owns the memory
                events.wait_on_stream(ticket)
            stuck.set()
            events.wait(ticket, 5)
            assert ring.record().value > ticket.value
    process_table().mappings.drain(20)
    assert fake.fake.calls["cuMemFree_v2"] == 1


def test_a_stream_waits_for_a_semaphore_and_is_let_go_when_the_peer_is_killed(
    survivor: EventSide, mortal: EventChild
) -> None:
    survivor.open(mortal.call("make", isolated=True)["data"])
    _hold_then_kill(survivor, mortal)


@pytest.mark.parametrize("on_device", [False, True], ids=["host page", "device page"])
def test_the_waiter_can_own_the_memory(survivor: EventSide, mortal: EventChild, on_device: bool) -> None:
    mortal.call("open_ring", data=survivor.make_waiting(on_device=on_device)["data"])
    _hold_then_kill(survivor, mortal)


def _hold_then_kill(survivor: EventSide, mortal: EventChild) -> None:
    """Our stream waits for work that comes, then for work that does not, since its process is killed."""
    ticket = mortal.call("work", spin_s=1.0)["ticket"]
    survivor.hold_stream(ticket)
    assert not survivor.query(ticket)["reached"]
    assert not survivor.stream_idle()["idle"]
    assert survivor.stream_idle(5)["idle"]
    assert survivor.query(ticket)["reached"]
    ticket = mortal.call("work", spin_s=50)["ticket"]
    survivor.hold_stream(ticket)
    mortal.kill()
    assert not survivor.stream_idle(0.2)["idle"]
    survivor.abandon()
    assert survivor.stream_idle(5)["idle"]
    for ask in (survivor.query, survivor.hold_stream):
        with pytest.raises(ShareError, match="died"):
            ask(ticket)


def test_cuda_events_hold_no_stream_and_are_shared_within_their_own_process(fake: FakeDriver) -> None:
    with make_event_ring(0, False, 2) as ring:
        data, fds = encode_events(ring)
        with open_events(data, fds) as events:
            ticket = ring.record()
            events.wait(ticket, 5)
            with pytest.raises(ShareError, match="cannot hold a stream"):
                events.wait_on_stream(ticket)
        assert fake.fake.calls["cuIpcOpenEventHandle"] == 0
        assert ring.reached(ring.record()) in (False, True)  # closing the other end left the ring's events alone
    with pytest.raises(StaleHandleError, match="closed"):
        open_events(data, fds)


def test_semaphores_work_within_one_process(fake: FakeDriver) -> None:
    with make_event_ring(0, True, 2) as ring, open_events(*encode_events(ring)) as events:
        ticket = ring.record()
        events.wait(ticket, 5)
        events.wait_on_stream(ticket)
    process_table().mappings.drain(20)
    assert fake.fake.calls["cuMemHostRegister_v2"] == 1
    assert fake.fake.calls["cuMemHostUnregister"] == 1


@pytest.mark.parametrize("isolated", [False, True], ids=["cuda", "semaphore"])
def test_a_record_that_fails_gives_its_slot_back(fake: FakeDriver, isolated: bool) -> None:
    with make_event_ring(0, isolated, 1) as ring:
        fake.fake.failures["cuStreamWriteValue64_v2" if isolated else "cuEventRecord"] = [400]
        with pytest.raises(CudaError):
            ring.record()
        assert ring.in_use == 0
        ring.record(timeout_s=0.5)


def test_a_ring_that_cannot_be_made_leaves_nothing(fake: FakeDriver) -> None:
    before = count_fds()
    fake.fake.failures["cuEventCreate"] = [0, 0, 2]
    with pytest.raises(CudaError):
        make_event_ring(0, False, 4)
    assert fake.fake.calls["cuEventDestroy_v2"] == 2
    fake.fake.failures["cuMemHostRegister_v2"] = [2]
    with pytest.raises(CudaError):
        make_event_ring(0, True, 4)
    for call in ("cuMemAlloc_v2", "cuIpcGetMemHandle", "cuStreamCreateWithPriority", "cuMemsetD8Async"):
        fake.fake.failures[call] = [2]
        with pytest.raises((CudaError, ShareError)):
            make_event_ring(0, True, 4, in_device_memory=True)
        assert not fake.fake.failures[call], call
    process_table().mappings.drain(20)
    assert fake.fake.calls["cuMemFree_v2"] == 3
    assert count_fds() == before
