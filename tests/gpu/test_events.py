"""Events between processes on a GPU: order, life of the event, and a peer that is killed before it signals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from doubles.event_side import EventChild, EventSide
from kvferry.errors import DeadlineError, ShareError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40)]


@pytest.fixture
def child() -> Iterator[EventChild]:
    process = EventChild(fake=False)
    with process:
        process.call("start")
        yield process


@pytest.fixture
def side(child: EventChild) -> Iterator[EventSide]:
    ours = EventSide(child.sock)
    ours.start()
    yield ours
    ours.close()


def test_events_opened_late_still_order_in_both_directions(side: EventSide, child: EventChild) -> None:
    child.ask("send_buffer")
    side.receive_buffer()
    child.answer()
    child.ask("receive_buffer")
    side.send_buffer()
    child.answer()
    for kind in ({}, {"isolated": True}, {"isolated": True, "in_device_memory": True}):
        ours = side.make(**kind)["data"]
        our_ticket = side.work(0.2)["ticket"]
        theirs = child.call("make", **kind)["data"]
        their_ticket = child.call("work", spin_s=0.2)["ticket"]
        side.churn(1000)
        child.call("churn", number=1000)
        time.sleep(2)

        side.open(theirs)
        child.call("open", data=ours)
        side.wait(their_ticket, 5)
        assert side.read()["bytes"] == [7, 7]
        child.call("wait", ticket=our_ticket, within_s=5)
        assert child.call("read")["bytes"] == [7, 7]
        child.call("release", ticket=their_ticket)
        side.release(our_ticket)

        # Now with the ring open: the wait really waits, and has a deadline.
        their_ticket = child.call("work", spin_s=0.5, value=9)["ticket"]
        assert not side.query(their_ticket)["reached"]
        with pytest.raises(DeadlineError):
            side.wait(their_ticket, 0.01)
        side.wait(their_ticket, 5)
        assert side.read()["bytes"] == [9, 9]
        for end in (side.events, side.ring):
            assert end is not None
            end.close()
    assert child.call("close")["mapped"] == 0


@pytest.mark.parametrize("memory", ["the recorder's page", "our page", "our device memory"])
def test_a_stream_that_waits_is_let_go_when_the_peer_is_killed(side: EventSide, child: EventChild, memory: str) -> None:
    if memory == "the recorder's page":
        side.open(child.call("make", isolated=True)["data"])
    else:
        child.call("open_ring", data=side.make_waiting(on_device=memory == "our device memory")["data"])
    ticket = child.call("work", spin_s=0.5)["ticket"]
    side.hold_stream(ticket)
    assert not side.stream_idle()["idle"]
    assert side.stream_idle(5)["idle"]
    assert side.query(ticket)["reached"]

    ticket = child.call("work", spin_s=30)["ticket"]
    side.hold_stream(ticket)
    child.kill()
    assert not side.stream_idle(0.5)["idle"]
    began = time.monotonic()
    side.abandon()
    assert side.stream_idle(5)["idle"]
    assert time.monotonic() - began < 1
    for ask in (side.query, side.hold_stream):
        with pytest.raises(ShareError, match="died"):
            ask(ticket)
    assert side.close()["mapped"] == 0
