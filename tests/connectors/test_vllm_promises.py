"""A server that does not answer costs the scheduler one wait, not one a request."""

from __future__ import annotations

from array import array

import pytest

from connectors.vllm_doubles import Clock
from kvferry.client import Lookup
from kvferry.connectors.vllm.promises import FIRST_PAUSE_S, LAST_PAUSE_S, Promises
from kvferry.errors import DeadlineError, KVFerryError, ServerGoneError
from kvferry.layout import KeyContext

TOKENS = array("i", range(64))


class Client:
    def __init__(self) -> None:
        self.connected = True
        self.error: KVFerryError | None = None
        self.attached: list[str] = []
        self.lookups = 0
        self.released: list[int] = []

    def attach(self, engine_id: str) -> bool:
        self.attached.append(engine_id)
        return True

    def lookup(self, name: str, tokens: array[int], *, context: KeyContext) -> Lookup:
        self.lookups += 1
        if self.error is not None:
            raise self.error
        return Lookup(64, 5)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def promises(client: Client, clock: Clock) -> Promises:
    return Promises(client, "engine", clock)  # type: ignore[arg-type]


def ask(promises: Promises) -> Lookup:
    return promises.lookup("r", TOKENS, KeyContext())


def test_it_attaches_once(client: Client, promises: Promises) -> None:
    assert ask(promises) == ask(promises) == Lookup(64, 5)
    assert client.attached == ["engine"]


def test_a_server_that_does_not_answer_is_left_alone_for_a_while(
    client: Client, promises: Promises, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    client.error = DeadlineError("no answer within 1 s")
    assert ask(promises) == Lookup(0, 0)
    assert not promises.usable
    for _ in range(5):
        assert ask(promises) == Lookup(0, 0)
    assert client.lookups == 1
    clock.now += FIRST_PAUSE_S + 1
    ask(promises)
    assert client.lookups == 2
    clock.now += FIRST_PAUSE_S + 1
    assert not promises.usable  # for longer each time
    assert caplog.text.count("no answer within 1 s") == 1

    client.error = None
    clock.now += LAST_PAUSE_S + 1
    assert ask(promises) == Lookup(64, 5)
    assert "answers again" in caplog.text


def test_a_server_that_is_gone_is_no_reason_to_pause(client: Client, promises: Promises) -> None:
    client.error = ServerGoneError("it went away")
    assert ask(promises) == Lookup(0, 0)
    client.error = None
    assert ask(promises) == Lookup(64, 5)


def test_while_cut_off_nothing_is_asked(client: Client, promises: Promises) -> None:
    client.connected = False
    assert ask(promises) == Lookup(0, 0)
    promises.release(5)
    assert (client.lookups, client.released) == (0, [])


def test_releasing_nothing(client: Client, promises: Promises) -> None:
    promises.release(0)
    assert client.released == []
