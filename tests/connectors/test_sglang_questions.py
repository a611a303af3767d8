"""A server that does not answer is left alone, for longer each time, until it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Lookup
from kvferry.connectors.sglang.questions import Questions
from kvferry.errors import DeadlineError, RequestError
from kvferry.layout import ChunkKeys

KEYS = bytes(range(32)) * 6


class Server:
    """Answers as `answer` says: so many pages, or an error. Each question takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answer: int | Exception = DeadlineError("late")
        self.asked: list[int] = []
        self.released: list[int] = []

    def lookup(self, name: str, keys: ChunkKeys, *, wait_s: float) -> Lookup:
        self.now += 1.0
        self.asked.append(len(keys))
        if isinstance(self.answer, Exception):
            raise self.answer
        count = min(self.answer, len(keys))
        return Lookup(count * 16, len(self.asked) if count else 0)

    def questions(self) -> Questions:
        client: Any = SimpleNamespace(connected=True, congested=False, lookup=self.lookup, release=self.released.append)
        return Questions(client, page_tokens=16, pause_s=5.0, answer_timeout_s=3.0, clock=lambda: self.now)


def test_pauses_grow_and_end_with_an_answer() -> None:
    server = Server()
    questions = server.questions()
    pauses = []
    for _ in range(7):
        assert questions.lookup(KEYS) == (0, 0)
        stopped = server.now
        while not questions.is_patient:
            server.now += 1.0
        pauses.append(server.now - stopped)
    assert pauses == [5, 10, 20, 40, 80, 80, 80]
    server.answer = 2
    assert questions.lookup(KEYS) == (2, 8)
    server.answer = DeadlineError("late")
    questions.lookup(KEYS)
    server.now += 5.0
    assert questions.is_patient


def test_a_refusal_is_a_miss_and_no_reason_to_pause(caplog: pytest.LogCaptureFixture) -> None:
    """Told once, and again when it comes back."""
    server = Server()
    questions = server.questions()
    for expected in (1, 2):
        server.answer = RequestError("busy", "not now")
        for _ in range(3):
            assert questions.runs(KEYS) == []
        assert questions.is_patient
        assert caplog.text.count("not now") == expected
        server.answer = 1
        questions.lookup(KEYS)


def test_chains_are_asked_for_one_after_the_other_in_bounded_time() -> None:
    server = Server()
    server.answer = 1
    questions = server.questions()
    runs = questions.runs(KEYS)  # six chains of a page; three seconds are enough for three or four of them
    assert [run.start for run in runs] == list(range(len(runs)))
    assert 3 <= len(runs) <= 4
    questions.give_back(runs)
    assert server.released == [run.lease_id for run in reversed(runs)]


def test_a_hit_that_ends_before_the_pages_asked_for_is_given_back() -> None:
    server = Server()
    server.answer = 2
    questions = server.questions()
    runs = questions.runs(KEYS[64:], prefix=KEYS[:64])
    assert server.asked[0] == 6
    assert server.released == [1]
    assert [(run.start, run.num_pages, run.skip) for run in runs] == [(0, 2, 0), (2, 2, 0)]
