"""The scheduler does not wait for a server that is slow or gone, and no promise is lost over that."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator

import pytest

from connectors.vllm_doubles import Clock
from kvferry.client import Lookup
from kvferry.connectors.vllm.promises import ANSWER_S, FIRST_PAUSE_S, LAST_PAUSE_S, Promises
from kvferry.errors import DeadlineError, KVFerryError, ServerGoneError
from kvferry.layout import KeyContext

TOKENS = array("i", range(64))
CONTEXT = KeyContext()


class Client:
    def __init__(self) -> None:
        self.connected = True
        self.error: Exception | None = None
        self.attached: list[str] = []
        self.asked: list[str] = []
        self.released: list[int] = []
        self.ended: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    def attach(self, engine_id: str) -> bool:
        self.attached.append(engine_id)
        return True

    def lookup(self, name: str, tokens: array[int], *, context: KeyContext) -> Lookup:
        self.asked.append(name)
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        return Lookup(len(tokens), len(self.asked))

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)

    def end_request(self, name: str) -> None:
        self.ended.append(name)

    def close(self) -> None:
        self.error = ServerGoneError("closed")
        self.answers.set()


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def promises(client: Client, clock: Clock) -> Iterator[Promises]:
    made = Promises(client, "engine", clock)  # type: ignore[arg-type]
    yield made
    made.close()
    made.close()


def ask(promises: Promises, name: str = "r", tokens: array[int] = TOKENS) -> Lookup:
    """Ask as vLLM does, until there is an answer."""
    deadline = time.monotonic() + 30
    while (found := promises.lookup(name, tokens, CONTEXT)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_it_attaches_once(client: Client, promises: Promises) -> None:
    assert ask(promises) == Lookup(64, 1)
    assert ask(promises) == Lookup(64, 2)
    assert client.attached == ["engine"]


def test_a_slow_server_is_not_waited_for(client: Client, promises: Promises) -> None:
    """However many requests come in meanwhile, all of them together cost less than one answer may take."""
    client.answers.clear()
    started = time.monotonic()
    for name in "abcdef" * 10:
        assert promises.lookup(name, TOKENS, CONTEXT) is None
    assert time.monotonic() - started < ANSWER_S
    client.answers.set()
    assert [ask(promises, name).tokens for name in "abcdef"] == [64] * 6
    assert client.asked == list("abcdef")  # once each


def test_what_nobody_waits_for_any_more_is_given_back(client: Client, promises: Promises) -> None:
    """A request ends, or asks for more tokens, while its answer is under way, and while it waits for its turn."""
    client.answers.clear()
    for name in "abc":
        assert promises.lookup(name, TOKENS, CONTEXT) is None
    promises.forget("a")
    promises.forget("c")
    assert promises.lookup("b", TOKENS * 2, CONTEXT) is None
    client.answers.set()
    assert ask(promises, "b", TOKENS * 2) == Lookup(128, 2)
    assert client.asked == ["a", "b"]
    assert client.released == [1]
    ask(promises, "d")
    assert client.ended == ["a", "c"]


def test_a_server_that_does_not_answer_is_left_alone_for_a_while(
    client: Client, promises: Promises, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    client.error = DeadlineError("no answer within 1 s")
    assert ask(promises) == Lookup(0, 0)
    assert not promises.usable
    for _ in range(5):
        assert ask(promises) == Lookup(0, 0)
    assert len(client.asked) == 1
    clock.now += FIRST_PAUSE_S + 1
    ask(promises)
    assert len(client.asked) == 2
    clock.now += FIRST_PAUSE_S + 1
    assert not promises.usable  # for longer each time
    assert caplog.text.count("no answer within 1 s") == 1

    client.error = None
    clock.now += LAST_PAUSE_S + 1
    assert ask(promises) == Lookup(64, 3)
    assert "answers again" in caplog.text


def test_who_waits_behind_a_request_that_gets_no_answer_waits_no_longer_than_it(
    client: Client, promises: Promises
) -> None:
    client.answers.clear()
    client.error = DeadlineError("no answer")
    for name in "abc":
        assert promises.lookup(name, TOKENS, CONTEXT) is None
    client.answers.set()
    assert ask(promises, "a") == Lookup(0, 0)
    assert promises.lookup("b", TOKENS, CONTEXT) == Lookup(0, 0)
    assert promises.lookup("c", TOKENS, CONTEXT) == Lookup(0, 0)


@pytest.mark.parametrize("error", [KVFerryError("no"), ValueError("token ids outside int32"), RuntimeError("a bug")])
def test_whatever_goes_wrong_is_an_answer(client: Client, promises: Promises, error: Exception, clock: Clock) -> None:
    """An exception in a hook would end vLLM's engine."""
    client.error = error
    assert ask(promises) == Lookup(0, 0)
    client.error = None
    clock.now += FIRST_PAUSE_S + 1
    assert ask(promises).tokens == 64


def test_a_server_that_is_gone_is_no_reason_to_pause(client: Client, promises: Promises) -> None:
    client.error = ServerGoneError("it went away")
    assert ask(promises) == Lookup(0, 0)
    client.error = None
    assert ask(promises) == Lookup(64, 2)


def test_while_cut_off_nothing_is_asked(client: Client, promises: Promises) -> None:
    client.connected = False
    assert ask(promises) == Lookup(0, 0)
    promises.release(5)
    promises.forget("r")
    promises.close()
    assert (client.asked, client.released) == ([], [])


def test_releasing(client: Client, promises: Promises) -> None:
    promises.release(0)
    promises.release(5)
    ask(promises)
    assert client.released == [5]


def test_closing_ends_the_thread_though_the_server_never_answers(client: Client, promises: Promises) -> None:
    client.answers.clear()
    assert promises.lookup("r", TOKENS, CONTEXT) is None
    promises.close()
    assert "kvferry-asker" not in [thread.name for thread in threading.enumerate()]
