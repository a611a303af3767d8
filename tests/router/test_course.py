"""Whom a request asks after what has failed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.balance import Balance
from kvferry.router.course import MAX_TRIES, Alone, Course
from kvferry.router.prefixes import cut_prefix
from kvferry.router.registry import Engine
from router.router_pieces import engine

P1, P2 = engine("P", 1), engine("P", 2)
D1, D2 = engine("D", 11), engine("D", 12)
PREFIX = cut_prefix(b"", b"")


def course(alone: Alone | None = None) -> Course:
    return Course(Balance(), PREFIX, alone=alone)


def keys(pair: object) -> tuple[object, object]:
    prefill: Engine | None = getattr(pair, "prefill", None)
    decode: Engine = getattr(pair, "decode")  # noqa: B009  pairs may be None for mypy
    return (None if prefill is None else prefill.key, decode.key)


def test_both_kinds_make_a_pair() -> None:
    assert keys(course().next([P1], [D1])) == (P1.key, D1.key)


def test_without_a_decode_engine_there_is_nobody_to_ask() -> None:
    assert course().next([P1], []) is None


def test_without_a_prefill_engine_the_decode_engine_is_alone() -> None:
    pair = course().next([], [D1])
    assert pair is not None
    assert (pair.prefill, pair.alone) == (None, Alone.NO_PREFILL)


def test_a_decode_engine_that_takes_no_kv_is_alone() -> None:
    pair = course().next([P1], [engine("D", 13, kv=0)])
    assert pair is not None
    assert (pair.prefill, pair.alone) == (None, Alone.NO_PREFILL)


def test_after_a_failure_another_is_asked_and_the_same_only_where_there_is_no_other() -> None:
    one = course()
    assert keys(one.next([P1, P2], [D1, D2])) == (P1.key, D1.key)
    assert one.failed(P1.key)
    assert keys(one.next([P1, P2], [D1]))[0] == P2.key
    assert one.failed(D1.key)
    assert keys(one.next([P1], [D1, D2])) == (P1.key, D2.key)


def test_where_prefill_engines_fail_three_times_the_decode_engine_is_asked_alone_and_that_is_the_last() -> None:
    one = course()
    for again in (True, True, True):
        pair = one.next([P1], [D1])
        assert pair is not None
        assert pair.prefill is P1
        assert one.failed(P1.key) is again
    pair = one.next([P1], [D1])
    assert pair is not None
    assert (pair.prefill, pair.alone) == (None, Alone.PREFILL_FAILED)
    assert one.failed(D1.key) is False


def test_what_a_prefill_engine_refuses_the_decode_engine_is_asked_alone() -> None:
    one = course()
    one.next([P1], [D1])
    one.refused()
    pair = one.next([P1], [D1])
    assert pair is not None
    assert (pair.prefill, pair.alone) == (None, Alone.PREFILL_REFUSED)


@given(st.lists(st.tuples(st.sampled_from("PDR"), st.booleans(), st.booleans()), min_size=30, max_size=30))
def test_it_ends_whatever_happens(events: list[tuple[str, bool, bool]]) -> None:
    one, tries = course(), 0
    for what, second_prefill, second_decode in events:
        pair = one.next([P1, P2] if second_prefill else [P1], [D1, D2] if second_decode else [D1])
        assert pair is not None
        if pair.prefill is None:
            assert pair.alone is not None
        tries += 1
        if what == "R" and pair.prefill is not None:
            one.refused()
        elif not one.failed(pair.prefill.key if what == "P" and pair.prefill is not None else pair.decode.key):
            break
    else:
        raise AssertionError("it went on and on")
    assert tries <= MAX_TRIES + 2
