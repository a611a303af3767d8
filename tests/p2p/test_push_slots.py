"""Slots of the NCCL ring: lent in turns, to nobody twice before each has one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.p2p.carriers.pushes.slots import Slots


class Peer:
    """Takes a slot for each thing that it has."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.wants = 0
        self.has: list[int] = []

    def pump(self) -> None:
        while self.wants:
            slot = self.slots.take(self)
            if slot is None:
                return
            self.has.append(slot)
            self.wants -= 1


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
def test_no_slot_twice_and_none_lost(steps: list[tuple[int, bool]]) -> None:
    slots = Slots(range(3))
    peers = [Peer(slots) for _ in range(4)]
    for number, more in steps:
        peer = peers[number]
        if more:
            peer.wants += 1
            peer.pump()
        elif peer.has:
            slots.give_back(peer.has.pop(0))
        lent = [slot for one in peers for slot in one.has]
        assert len(lent) == len(set(lent)) <= 3
        assert len(lent) == 3 or not any(one.wants for one in peers)  # no slot is free while somebody waits
    while any(one.has for one in peers):
        for one in peers:
            if one.has:
                slots.give_back(one.has.pop(0))
    assert not any(one.wants for one in peers)


def test_each_has_one_before_anybody_has_two() -> None:
    slots = Slots(range(2))
    greedy, modest = Peer(slots), Peer(slots)
    greedy.wants = 10
    greedy.pump()
    modest.wants = 1
    modest.pump()
    assert (len(greedy.has), len(modest.has)) == (2, 0)
    slots.give_back(greedy.has.pop())
    assert (len(greedy.has), len(modest.has)) == (1, 1)
