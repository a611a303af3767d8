"""Link: what a client may say about a server that hangs up, with copies of it perhaps still going on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.client.link import Link
from kvferry.client.waiting import Answer
from kvferry.errors import DeadlineError, KVFerryError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Closed, Error, Message, Ping, Pong, Welcome


class Server:
    """A server of this very process, which therefore never ends; it says what it is told to."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.peer: socket.socket | None = None

    def greet(self, *messages: Message) -> threading.Thread:
        """Take one client in a thread, and send `messages`."""

        def run() -> None:
            if self.peer is not None:
                self.peer.close()
            self.peer, _ = self._listener.accept()
            for message in messages:
                self.peer.sendall(encode_frame(message))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def hang_up(self) -> None:
        assert self.peer is not None
        self.peer.close()

    def close(self) -> None:
        self._listener.close()
        if self.peer is not None:
            self.peer.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def link(server: Server, tmp_path: Path) -> Iterator[Link]:
    thread = server.greet(Welcome(1, b"i" * 16))
    made = Link(str(tmp_path / "s"), 5)
    thread.join()
    yield made
    made.close()


def failure(call: Callable[[], object]) -> KVFerryError:
    try:
        call()
    except KVFerryError as error:
        return error
    raise AssertionError("it did not fail")


def until(answers: list[Answer], count: int = 1) -> None:
    deadline = time.monotonic() + 5
    while len(answers) < count and time.monotonic() < deadline:
        time.sleep(0.002)


def test_jobs_are_not_given_up_while_the_server_may_still_copy(server: Server, link: Link) -> None:
    jobs: list[Answer] = []
    link.expect(jobs.append)
    server.hang_up()  # without a word, as by a process that is dying
    with pytest.raises(ServerGoneError):
        link.call(Ping, Pong, 1)
    assert not link.close(0.3)
    assert jobs == []
    server.greet(Welcome(1, b"i" * 16)).join()  # it lives, so that its copies had stopped
    until(jobs)
    assert isinstance(jobs[0], ServerGoneError)


def test_another_server_at_the_same_place_says_nothing_about_the_first(server: Server, link: Link) -> None:
    jobs: list[Answer] = []
    link.expect(jobs.append)
    server.hang_up()
    server.greet(Welcome(1, b"j" * 16)).join()
    time.sleep(0.1)
    assert jobs == []
    server.greet(Welcome(1, b"i" * 16)).join()
    until(jobs)
    assert isinstance(jobs[0], ServerGoneError)


@pytest.mark.parametrize("last", [b"", encode_frame(Closed("that is all")), b"\xff" * 100])
def test_a_client_that_hangs_up_waits_for_the_copies_too(server: Server, link: Link, last: bytes) -> None:
    jobs: list[Answer] = []
    talks: list[Answer] = []
    link.expect(jobs.append)
    seq = link.expect(jobs.append)
    thread = threading.Thread(target=lambda: talks.append(failure(lambda: link.call(Ping, Pong, 5))))
    thread.start()
    assert server.peer is not None
    server.peer.recv(100)
    started = time.monotonic()
    assert not link.close(0.1)
    thread.join(1)
    assert isinstance(talks[0], ServerGoneError)
    assert time.monotonic() - started < 1
    assert jobs == []
    server.peer.sendall(encode_frame(Error(seq, "cancelled", "stopped")))
    until(jobs)
    assert jobs == [Error(seq, "cancelled", "stopped")]
    server.peer.sendall(last)
    if b"Closed" not in last and b"closed" not in last:
        assert len(jobs) == 1
        server.hang_up()
        server.greet(Welcome(1, b"i" * 16)).join()
    until(jobs, 2)
    assert isinstance(jobs[1], ServerGoneError)
    assert link.close(5)


def test_a_server_that_says_goodbye_has_stopped_its_copies(server: Server, link: Link) -> None:
    jobs: list[Answer] = []
    link.expect(jobs.append)
    assert server.peer is not None
    server.peer.sendall(encode_frame(Closed("that is all")))
    until(jobs)
    assert "that is all" in str(jobs[0])


def test_silence_ends_by_the_deadline_and_the_late_answer_is_dropped(server: Server, link: Link) -> None:
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        link.call(Ping, Pong, 0.1)
    assert server.peer is not None
    server.peer.sendall(encode_frame(Pong(1)))
    with link.conversation() as talk:
        server.peer.sendall(encode_frame(Pong(talk.seq)))
        assert talk.receive(Pong, 5) == Pong(talk.seq)


def test_answers_that_do_not_fit(server: Server, link: Link) -> None:
    assert server.peer is not None
    with link.conversation() as talk:
        server.peer.sendall(encode_frame(Error(talk.seq, "busy", "later")) + encode_frame(Welcome(1, b"")))
        with pytest.raises(RequestError, match=r"later \[busy\]"):
            talk.receive(Pong, 5)
        server.peer.sendall(encode_frame(Error(talk.seq, "busy", "later")).replace(b"later", b"\xff\xff\xff\xff\xff"))
        with pytest.raises(ServerGoneError, match="broke the protocol"):
            talk.receive(Pong, 5)


def test_a_greeting_that_is_refused(server: Server, tmp_path: Path) -> None:
    for message, kind in ((Error(0, "uid", "not you"), RequestError), (Pong(1), ProtocolError)):
        thread = server.greet(message)
        with pytest.raises(kind):
            Link(str(tmp_path / "s"), 5)
        thread.join()


def test_a_greeting_that_never_comes(server: Server, tmp_path: Path) -> None:
    thread = server.greet()
    with pytest.raises(DeadlineError, match="greeting"):
        Link(str(tmp_path / "s"), 0.1)
    thread.join()
