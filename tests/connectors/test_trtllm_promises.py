"""Lookups of TensorRT-LLM's connector: what goes wrong is a miss, told once, and not tried again at once."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from kvferry.client import Lookup
from kvferry.connectors.trtllm.promises import FIRST_PAUSE_S, LAST_PAUSE_S, Promises
from kvferry.connectors.trtllm.requests import NO_PROMISE
from kvferry.errors import DeadlineError, RequestError, ServerGoneError
from kvferry.layout import KeyContext

TOKENS = array("i", range(64))


class Client:
    connected = True
    congested = False

    def __init__(self) -> None:
        self.answer: Lookup | Exception = Lookup(64, 9)
        self.calls: list[Any] = []

    def attach(self, engine_id: str) -> bool:
        self.calls.append(engine_id)
        return True

    def lookup(self, name: str, tokens: Any, *, context: KeyContext, wait_s: float) -> Lookup:
        self.calls.append((name, wait_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def release(self, lease_id: int) -> None:
        self.calls.append(lease_id)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def promises_of(client: Client, clock: Clock) -> Promises:
    return Promises(client, "e", disk_wait_s=0.5, clock=clock)  # type: ignore[arg-type]


def test_the_engine_is_attached_to_once() -> None:
    client = Client()
    promises = promises_of(client, Clock())
    assert [promises.lookup(name, TOKENS, KeyContext()) for name in "ab"] == [Lookup(64, 9)] * 2
    assert client.calls == ["e", ("a", 0.5), ("b", 0.5)]


def test_a_server_that_does_not_answer_is_left_alone_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    client, clock = Client(), Clock()
    promises = promises_of(client, clock)
    client.answer = DeadlineError("too late")
    pause = FIRST_PAUSE_S
    for _ in range(6):
        assert promises.lookup("a", TOKENS, KeyContext()) == NO_PROMISE
        asked = len(client.calls)
        clock.now += pause - 0.1
        assert not promises.usable
        assert promises.lookup("a", TOKENS, KeyContext()) == NO_PROMISE
        assert len(client.calls) == asked
        clock.now += 0.2
        pause = min(2 * pause, LAST_PAUSE_S)
    assert caplog.text.count("too late") == 1
    client.answer = Lookup(64, 9)
    assert promises.lookup("a", TOKENS, KeyContext()).tokens == 64
    assert "answers again" in caplog.text
    client.answer = RequestError("busy", "too many")
    promises.lookup("a", TOKENS, KeyContext())
    clock.now += FIRST_PAUSE_S + 0.1
    assert promises.usable


def test_a_server_that_is_gone_costs_nothing() -> None:
    client = Client()
    promises = promises_of(client, Clock())
    client.answer = ServerGoneError("it went away")
    assert promises.lookup("a", TOKENS, KeyContext()) == NO_PROMISE
    assert promises.usable  # the client knows when there is another
    client.connected = False
    asked = len(client.calls)
    assert promises.lookup("a", TOKENS, KeyContext()) == NO_PROMISE
    assert len(client.calls) == asked


def test_promises_are_given_back_only_where_that_does_not_wait() -> None:
    client = Client()
    promises = promises_of(client, Clock())
    promises.release(0)
    promises.release(3)
    client.congested = True
    promises.release(4)
    assert client.calls == [3]
