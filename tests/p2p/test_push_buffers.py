"""Buffers of the carriers that push: lent in turns, one to each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TransferError
from kvferry.p2p.carriers.pushes.buffers import Buffer, Buffers


def some(count: int) -> list[Buffer]:
    nothing: Any = None
    return [Buffer((number,), 100, nothing) for number in range(count)]


class Peer:
    """Wants a buffer, or does not."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.wants = False
        self.has: Buffer | None = None

    def pump(self) -> None:
        if self.wants and self.has is None:
            self.has = self.buffers.take(self)
            self.wants = self.has is None

    def give_back(self) -> None:
        has, self.has = self.has, None
        if has is not None:
            self.buffers.give_back(has)

    def give_up(self) -> None:
        self.wants = False
        self.buffers.forget(self)


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["want", "give back", "give up"])), max_size=80))
def test_none_twice_and_none_lost(steps: list[tuple[int, str]]) -> None:
    buffers = Buffers(some(2))
    peers = [Peer(buffers) for _ in range(4)]
    for number, step in steps:
        peer = peers[number]
        if step == "want" and peer.has is None:
            peer.wants = True
            peer.pump()
        elif step == "give back":
            peer.give_back()
        elif step == "give up":
            peer.give_up()
        lent = [one.has for one in peers if one.has is not None]
        assert len(lent) == len(set(lent)) <= 2
        assert len(lent) == 2 or not any(one.wants for one in peers)  # none is free while somebody waits
        assert buffers.are_waited_for == any(one.wants for one in peers)
    for _ in peers:
        for one in peers:
            one.give_back()
    assert not any(one.wants for one in peers)


def test_who_waited_first_gets_it_first() -> None:
    buffers = Buffers(some(1))
    peers = [Peer(buffers) for _ in range(3)]
    for peer in peers:
        peer.wants = True
        peer.pump()
    for number, peer in enumerate(peers):
        assert [one.has is not None for one in peers] == [place == number for place in range(3)]
        peer.wants = True  # again, behind the others
        peer.give_back()
        peer.pump()
    assert peers[0].has is not None


def test_where_all_are_lost() -> None:
    """Who waits is told, and so is who comes later."""
    buffers = Buffers(some(2))
    peers = [Peer(buffers) for _ in range(3)]
    for peer in peers:
        peer.wants = True
        peer.pump()
    buffers.lose()
    assert peers[2].has is None
    with pytest.raises(TransferError, match="restart"):
        buffers.lose()
    with pytest.raises(TransferError, match="restart"):
        buffers.take(Peer(buffers))


def test_the_largest_that_is_free_is_lent() -> None:
    nothing: Any = None
    small, large = (Buffer((number,), size, nothing) for number, size in enumerate((10, 100)))
    buffers = Buffers([small, large])
    peers = [Peer(buffers) for _ in range(3)]
    for peer in peers:
        peer.wants = True
        peer.pump()
    assert [peer.has for peer in peers] == [large, small, None]
    peers[0].give_back()
    assert peers[2].has == large
