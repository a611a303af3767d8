"""Who gets room, and when; what becomes of ids. On the tables alone, step by step."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import Offer, Stopped
from kvferry.p2p.transfers.incoming_records import InKey
from kvferry.p2p.transfers.memory import MAX_REMEMBERED, EndedIds, Ending, Remembered
from kvferry.p2p.transfers.unclaimed import MAX_UNCLAIMED
from p2p.transfer_world import BLOCKS, ITEMS, LEASE_S, Room, World


def send(world: World, name: str, nbytes: int) -> None:
    world.send(name, nbytes, keep=False, ready=True)
    world.settle()


def kept(world: World) -> list[int]:
    """Bytes of each transfer that has room."""
    return sorted(room.nbytes for room in world.reserved)


def offer_from(world: World, session: int, number: int, nbytes: int, name: str) -> None:
    """As of a peer that does nothing more."""
    offer = Offer(number=number, transfer_id=name, part=0, item_bytes=(nbytes,), lease_s=LEASE_S, num_blocks=BLOCKS)
    world.into.offered(session, offer, world.now)


def test_a_transfer_that_fits_passes_one_that_does_not() -> None:
    world = World()
    send(world, "first", 20)
    send(world, "large", 30)
    send(world, "small", 10)
    assert kept(world) == [30, 60]
    assert not world.sent[2].outcomes


def test_nobody_overtakes_one_that_has_waited_for_long() -> None:
    world = World()
    send(world, "first", 20)
    send(world, "large", 30)
    world.pass_time(LEASE_S * 0.6)
    send(world, "small", 10)
    assert kept(world) == [60]
    first = world.claim("first", own_memory=True, wait_s=5, ask=False)
    world.settle()
    assert first.outcomes == [None]
    world.into.fill_room(world.now)
    world.settle()
    assert world.sent[2].outcomes == [None]
    assert kept(world)[-1] == 90


def test_what_is_claimed_goes_first() -> None:
    world = World()
    send(world, "first", 33)
    send(world, "unclaimed", 33)
    world.claim("claimed", own_memory=False, wait_s=5, ask=False)
    send(world, "claimed", 33)
    first = world.claim("first", own_memory=False, wait_s=5, ask=False)
    world.give_back(first.places[0])
    world.settle()
    assert world.wanted[0].outcomes == [None]
    assert not world.sent[2].outcomes


def test_the_peer_that_holds_least_goes_first() -> None:
    world = World()
    offer_from(world, 7, 1, 40, "a")
    offer_from(world, 8, 1, 60, "b")
    offer_from(world, 8, 2, 30, "waits longest")
    offer_from(world, 7, 2, 30, "waits")
    world.into.session_lost(9, TransferError("peer_gone", "!"), world.now)  # of which nothing is known
    assert kept(world) == [40, 60]
    (first,) = [room for room in world.reserved if room.session == 7]
    world.reserved.remove(first)
    world.reserved.append(Room(7, 10))
    world.into.fill_room(world.now)
    assert kept(world) == [10, 30, 60]
    assert [room.session for room in world.reserved if room.nbytes == 30] == [7]


def test_own_memory_needs_no_room() -> None:
    world = World()
    send(world, "first", 33)
    mine = world.claim("mine", own_memory=True, wait_s=5, ask=False)
    send(world, "mine", 1000)
    assert mine.outcomes == [None]
    assert sorted(mine.content) == list(range(ITEMS))


def test_unclaimed_transfers_are_bounded_for_each_peer() -> None:
    world = World()
    for number in range(1, MAX_UNCLAIMED // 2 + 10):
        offer_from(world, world.session, number, 50, f"{number}")
    refusals = [message for _, message in world.to_sender if isinstance(message, Stopped)]
    assert {message.code for message in refusals} == {"too_many"}
    assert len(refusals) == 9
    assert world.into.num_unclaimed == MAX_UNCLAIMED // 2
    offer_from(world, 77, 1, 50, "another peer's")
    assert world.into.num_unclaimed == MAX_UNCLAIMED // 2 + 1


def test_ids_that_have_ended_are_bounded() -> None:
    ended: EndedIds[int] = EndedIds()
    for key in range(MAX_REMEMBERED + 50):
        ended.remember(key, Remembered(Ending.UNWANTED, "cancelled", "!", until=10.0))
    assert len(ended) == MAX_REMEMBERED
    assert ended.find(10, now=1.0) is None
    assert ended.find(MAX_REMEMBERED, now=1.0) is not None
    assert ended.find(MAX_REMEMBERED, now=10.0) is None
    assert len(ended) == MAX_REMEMBERED - 1


def test_what_is_unwanted_is_refused_until_it_is_claimed_again() -> None:
    world = World()
    world.into.cancel(InKey("a", 0), TransferError("cancelled", "!"), world.now)
    send(world, "a", 10)
    (error,) = world.sent[1].outcomes
    assert error is not None
    assert error.code == "cancelled"
    again = world.claim("a", own_memory=True, wait_s=5, ask=False)
    send(world, "a", 10)
    assert again.outcomes == [None]


def test_what_was_dropped_may_come_again() -> None:
    world = World()
    world.send("a", 10, keep=False, ready=False)
    world.settle()
    world.lose_session()
    world.settle()
    late = world.claim("a", own_memory=True, wait_s=5, ask=False)
    assert [error.code for error in late.outcomes if error] == ["peer_gone"]
    send(world, "a", 10)
    assert world.sent[2].outcomes == [None]


@pytest.mark.parametrize("own_memory", [False, True])
def test_a_lease_ends_what_nobody_takes(own_memory: bool) -> None:
    world = World()
    send(world, "a", 10)
    world.pass_time(LEASE_S)
    assert world.reserved == []
    late = world.claim("a", own_memory=own_memory, wait_s=5, ask=False)
    assert [error.code for error in late.outcomes if error] == ["expired"]
