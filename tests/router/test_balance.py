"""Who is chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.balance import Balance
from kvferry.router.prefixes import PIECE_BYTES, Prefix, cut_prefix
from router.router_pieces import engine

P1, P2 = engine("P", 1), engine("P", 2)
D1, D2, D3 = (engine("D", number) for number in (11, 12, 13))


def prompt(letter: str, pieces: int) -> Prefix:
    return cut_prefix(b"m", letter.encode() * pieces * PIECE_BYTES)


def test_a_known_beginning_goes_where_it_is_known() -> None:
    balance = Balance()
    for letter in "abcdef":
        chosen, seen = balance.prefill([P1, P2], prompt(letter, 8))
        assert seen == 0
        balance.begin_prefill(chosen, prompt(letter, 8), seen).end()
        for _ in range(3):
            assert balance.prefill([P1, P2], prompt(letter, 9)) == (chosen, 8 * PIECE_BYTES)


def test_beginnings_that_nobody_knows_go_round() -> None:
    balance = Balance()
    chosen = [balance.prefill([P1, P2], prompt(letter, 2))[0] for letter in "abcd"]
    assert chosen == [P1, P2, P1, P2]


def test_one_hot_beginning_does_not_overload_its_engine() -> None:
    """Each request has a rest of its own behind it, so what waits there grows; then the other one learns it, too."""
    balance, counts = Balance(), {P1.serial: 0, P2.serial: 0}
    for number in range(40):
        prefix = cut_prefix(b"m", b"h" * 8 * PIECE_BYTES + bytes([number]) * 2 * PIECE_BYTES)
        chosen, seen = balance.prefill([P1, P2], prefix)
        balance.begin_prefill(chosen, prefix, seen)
        counts[chosen.serial] += 1
    assert min(counts.values()) >= 17


def test_a_beginning_weighs_less_than_a_long_queue_and_more_than_a_short_one() -> None:
    balance = Balance()
    balance.begin_prefill(P1, prompt("a", 8), 0).end()
    short = balance.begin_prefill(P1, prompt("b", 4), 0)
    assert balance.prefill([P1, P2], prompt("a", 8))[0] is P1
    balance.begin_prefill(P1, prompt("c", 4), 0)
    assert balance.prefill([P1, P2], prompt("a", 8))[0] is P2
    short.end()
    short.end()
    assert balance.prefill([P1, P2], prompt("a", 8))[0] is P1


def test_the_decode_engine_with_the_fewest_requests_is_chosen_and_of_equals_the_next() -> None:
    balance = Balance()
    assert [balance.decode([D1, D2, D3]) for _ in range(4)] == [D1, D2, D3, D1]
    works = [balance.begin_decode(one) for one in (D1, D1, D2, D2, D3)]
    assert balance.decode([D1, D2, D3]) is D3
    works[0].end()
    works[1].end()
    assert [balance.decode([D1, D2, D3]) for _ in range(2)] == [D1, D1]


def test_loads_of_engines_that_are_gone_are_forgotten_once_they_have_nothing_to_do() -> None:
    balance = Balance()
    work = balance.begin_decode(D1)
    balance.begin_decode(D2).end()
    balance.keep_only([D3])
    assert list(balance._loads) == [D1.serial]
    work.end()
    balance.keep_only([D3])
    assert balance._loads == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60))
def test_what_has_ended_weighs_nothing(steps: list[tuple[int, int]]) -> None:
    balance, going_on = Balance(), []
    for which, count in steps:
        one = (D1, D2, D3)[which]
        going_on.append(balance.begin_decode(one))
        going_on.append(balance.begin_prefill(one, prompt("x", count), 0))
    for work in reversed(going_on):
        work.end()
    assert all((load.requests, load.num_bytes) == (0, 0) for load in balance._loads.values())
