"""Beginnings of prompts, and who has seen them, against a model that keeps whole prompts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.router.prefixes import PIECE_BYTES, PrefixIndex, cut_prefix


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_only_full_pieces_have_names(size: int) -> None:
    prefix = cut_prefix(b"m", b"x" * size)
    assert (len(prefix.pieces), prefix.num_bytes) == (size // PIECE_BYTES, size)


@given(st.binary(max_size=1000), st.binary(max_size=1000), st.binary(max_size=1000))
def test_equal_beginnings_have_equal_names(common: bytes, one: bytes, other: bytes) -> None:
    first, second = cut_prefix(b"m", common + one), cut_prefix(b"m", common + other)
    equal = 0
    while (common + one)[:equal] == (common + other)[:equal] and equal <= len(common) + min(len(one), len(other)):
        equal += 1
    shared = (equal - 1) // PIECE_BYTES
    assert first.pieces[:shared] == second.pieces[:shared]
    assert not set(first.pieces[shared:]) & set(second.pieces[shared:])


def test_the_seed_tells_equal_prompts_apart() -> None:
    assert not set(cut_prefix(b"m", bytes(999)).pieces) & set(cut_prefix(b"n", bytes(999)).pieces)


def test_no_prompt_has_more_pieces_than_are_of_use() -> None:
    assert len(cut_prefix(b"", bytes(8 << 20)).pieces) == 4096


def test_the_last_pieces_go_first_and_what_is_used_stays() -> None:
    index = PrefixIndex(6)
    old, used, new = (cut_prefix(b"", bytes([n]) * 3 * PIECE_BYTES).pieces for n in range(3))
    index.add(old, 1)
    index.add(used, 1)
    assert index.matched(old) == index.matched(used) == {1: 3}
    index.add(used, 2)
    index.add(new[:2], 1)
    assert index.matched(old) == {1: 1}
    assert index.matched(used) == {1: 3, 2: 3}


def test_of_one_piece_the_last_engines_are_known() -> None:
    index = PrefixIndex(100)
    pieces = cut_prefix(b"", bytes(PIECE_BYTES)).pieces
    for engine in range(20):
        index.add(pieces, engine)
    assert set(index.matched(pieces)) == set(range(12, 20))


class IndexMachine(RuleBasedStateMachine):
    """Prompts over an alphabet of two pieces, three engines, room for all."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1000)
        self.sent: set[tuple[int, tuple[bytes, ...]]] = set()

    @rule(engine=st.integers(1, 3), words=st.lists(st.sampled_from(b"ab"), max_size=5))
    def add(self, engine: int, words: list[int]) -> None:
        pieces = cut_prefix(b"", b"".join(bytes([word]) * PIECE_BYTES for word in words)).pieces
        self.index.add(pieces, engine)
        self.sent |= {(engine, pieces[:length]) for length in range(1, len(pieces) + 1)}

    @rule(words=st.lists(st.sampled_from(b"ab"), max_size=6))
    def match(self, words: list[int]) -> None:
        pieces = cut_prefix(b"", b"".join(bytes([word]) * PIECE_BYTES for word in words)).pieces
        wanted = {
            engine: max((n for n in range(1, len(pieces) + 1) if (engine, pieces[:n]) in self.sent), default=0)
            for engine in (1, 2, 3)
        }
        assert self.index.matched(pieces) == {engine: count for engine, count in wanted.items() if count}

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.index) <= len({pieces for _, pieces in self.sent})


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=30))
def test_it_never_has_more_than_it_may(room: int, prompts: list[tuple[int, int]]) -> None:
    index = PrefixIndex(room)
    for length, letter in prompts:
        pieces = cut_prefix(b"", bytes([letter]) * length * PIECE_BYTES).pieces
        index.add(pieces, 1)
        assert len(index) <= room
        assert index.matched(pieces).get(1, 0) == min(length, room)
