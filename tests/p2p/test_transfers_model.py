"""Both sides of transfers under everything that can happen, in any order: delivered once, or failed; nothing touched
after the end; room counted; nothing left."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import TransferError
from kvferry.p2p.transfers.incoming_records import InKey
from kvferry.p2p.transfers.outgoing_records import State
from p2p.transfer_world import BLOCKS, ITEMS, LEASE_S, ROOM, ReadingWorld, Room, Wanted, World


class TransfersMachine(RuleBasedStateMachine):
    """Few ids, little room, so that all gets in each other's way."""

    ids = st.sampled_from(("a", "b", "c"))
    picks = st.integers(0, 1000)

    make_world: type[World] = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make_world()

    @rule(name=ids, nbytes=st.sampled_from((3, 10, 20, 33, 40)), keep=st.booleans(), ready=st.booleans())
    def send(self, name: str, nbytes: int, keep: bool, ready: bool) -> None:
        self.world.send(name, nbytes, keep=keep, ready=ready)

    @rule(name=ids, wait_s=st.sampled_from((0.5, 3.0, 30.0)), ask=st.booleans())
    def claim(self, name: str, wait_s: float, ask: bool) -> None:
        self.world.claim(name, own_memory=False, wait_s=wait_s, ask=ask)

    @rule(name=ids, wait_s=st.sampled_from((0.5, 3.0, 30.0)), ask=st.booleans(), skip=st.integers(0, BLOCKS - 1))
    def claim_into_memory(self, name: str, wait_s: float, ask: bool, skip: int) -> None:
        self.world.claim(name, own_memory=True, wait_s=wait_s, ask=ask, skip_blocks=skip)

    @rule(name=ids)
    def withdraw(self, name: str) -> None:
        """Nothing that the sender has under the id goes on."""
        self.world.withdraw(name)
        for out in self.world.out._by_number.values():
            assert out.state is State.ENDING or out.key.transfer_id != name

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks, item=st.integers(0, ITEMS - 1))
    def ready(self, pick: int, item: int) -> None:
        self.world.out.items_ready(1 + pick % len(self.world.sent), [item])

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks)
    def cancel_sending(self, pick: int) -> None:
        self.world.out.cancel(1 + pick % len(self.world.sent), self.world.now, TransferError("cancelled", "!"))

    @rule(name=ids)
    def cancel_claim(self, name: str) -> None:
        self.world.into.cancel(InKey(name, 0), TransferError("cancelled", "!"), self.world.now)

    @precondition(lambda self: self.world.to_receiver)
    @rule()
    def hear_sender(self) -> None:
        self.world.hear_sender()

    @precondition(lambda self: self.world.to_sender)
    @rule()
    def hear_receiver(self) -> None:
        self.world.hear_receiver()

    @precondition(lambda self: self.world.flying)
    @rule(pick=picks)
    def land(self, pick: int) -> None:
        self.world.land(pick)

    @precondition(lambda self: self.world.sender_stops)
    @rule()
    def stop_sender(self) -> None:
        self.world.stop_sender()

    @precondition(lambda self: self.world.receiver_stops)
    @rule()
    def stop_receiver(self) -> None:
        self.world.stop_receiver()

    @precondition(lambda self: self.world.copies)
    @rule()
    def copy(self) -> None:
        self.world.copy()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def lose_session(self) -> None:
        """What was offered, or asked for, over it has ended once the carriers have stopped."""
        told = [
            sent
            for sent in self.world.sent.values()
            if not sent.outcomes and any(out.number == sent.number for out in self.world.of_this_session())
        ]
        self.world.lose_session()
        while self.world.sender_stops:
            self.world.stop_sender()
        read = set(self.world.reading)
        assert all(sent.outcomes for sent in told if sent.number not in read)

    @precondition(lambda self: self.world.reads)
    @rule()
    def read_no_more(self) -> None:
        self.world.read_no_more()
        while self.world.sender_stops:
            self.world.stop_sender()
        assert set(self.world.reading.values()) <= {self.world.session}

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.lent())
    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        lent = self.lent()
        self.world.give_back(lent[pick % len(lent)])

    def lent(self) -> list[Any]:
        """What callers hold of the buffer."""
        return [place for wanted in self.world.wanted for place in wanted.places if place in self.world.reserved]

    @invariant()
    def outcomes_come_once(self) -> None:
        assert all(len(sent.outcomes) <= 1 for sent in self.world.sent.values())
        assert all(len(wanted.outcomes) <= 1 for wanted in self.world.wanted)

    @invariant()
    def nothing_is_touched_after_the_end(self) -> None:
        for _, number, _ in self.world.flying:
            assert not self.world.sent[number].outcomes
        for memory in [*self.world.landing.values(), *(copy[2] for copy in self.world.copies)]:
            assert not (isinstance(memory, Wanted) and memory.outcomes)
            assert not isinstance(memory, Room) or memory in self.world.reserved

    @invariant()
    def what_is_delivered_is_whole(self) -> None:
        for wanted in self.world.wanted:
            if wanted.outcomes == [None]:
                content = wanted.content if wanted.own_memory else wanted.places[0].content
                assert sorted(content) == list(range(ITEMS))
                ((number, first_block),) = set(content.values())
                assert first_block == wanted.skip_blocks
                assert self.world.sent[number].transfer_id == wanted.key.transfer_id

    @invariant()
    def room_is_counted(self) -> None:
        assert sum(room.nbytes for room in self.world.reserved) <= ROOM

    def teardown(self) -> None:
        """Given time, all ends, and nothing is left but what callers hold."""
        for _ in range(8):
            self.world.settle()
            self.world.pass_time(LEASE_S)
        self.world.pass_time(30)
        self.world.settle()
        self.world.pass_time(LEASE_S)
        self.world.settle()
        assert all(len(sent.outcomes) == 1 for sent in self.world.sent.values())
        assert all(len(wanted.outcomes) == 1 for wanted in self.world.wanted)
        assert len(self.world.out) == len(self.world.into) == self.world.into.num_unclaimed == 0
        assert self.world.out.blocks_kept_beyond_lease == 0
        assert sorted(map(id, self.world.reserved)) == sorted(map(id, self.lent()))
        assert self.world.out.tick(self.world.now) == self.world.into.tick(self.world.now) == math.inf


class ReadTransfersMachine(TransfersMachine):
    """The same where the receiver reads the source."""

    make_world = ReadingWorld


TestTransfers = TransfersMachine.TestCase
TestTransfers.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestReadTransfers = ReadTransfersMachine.TestCase
TestReadTransfers.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_the_peer_reads_already_is_kept_until_it_has_stopped() -> None:
    """It was offered with items that were there, and given up before the peer's answer had come."""
    world = ReadingWorld()
    sent = world.send("a", 10, keep=False, ready=True)
    world.hear_sender()
    assert len(world.flying) == ITEMS
    world.out.cancel(sent.number, world.now, TransferError("cancelled", "!"))
    assert not sent.outcomes
    world.settle()
    assert [error.code for error in sent.outcomes if error] == ["cancelled"]
    assert not world.flying


def test_what_became_ready_before_there_was_a_place_is_read_at_once() -> None:
    """Offered with nothing, told of item by item, and claimed last: no message is waited for then."""
    world = ReadingWorld()
    world.send("a", 10, keep=False, ready=False)
    for item in range(ITEMS):
        world.out.items_ready(1, [item, item])
    world.reserved.append(Room(1, ROOM))  # so that it lands nowhere else
    while world.to_receiver:
        world.hear_sender()
    assert not world.flying
    wanted = world.claim("a", own_memory=True, wait_s=30, ask=False)
    assert len(world.flying) == ITEMS
    while world.flying:
        world.land(0)
    assert wanted.outcomes == [None]
    world.settle()
    assert world.sent[1].outcomes == [None]


def test_what_becomes_ready_twice_is_sent_once() -> None:
    world = World()
    world.send("a", 10, keep=False, ready=False)
    world.claim("a", own_memory=True, wait_s=30, ask=False)
    world.settle()
    world.out.items_ready(1, [0, 0])
    world.out.items_ready(1, [0, 1, 1])
    assert [item for _, _, item in world.flying] == [0, 1]
