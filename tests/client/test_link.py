"""Link: what a client may say about a server that hangs up, with copies of it perhaps still going on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.link_server import Server, until
from kvferry.client.link import Link
from kvferry.client.waiting import Answer
from kvferry.errors import DeadlineError, KVFerryError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.address import UnixAddress
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Closed, Error, Ping, Pong, Welcome
from serving.process import eventually


def failure(call: Callable[[], object]) -> KVFerryError:
    try:
        call()
    except KVFerryError as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("last", [b"", encode_frame(Closed("that is all")), b"\xff" * 100])
def test_a_client_that_hangs_up_waits_for_the_copies_too(server: Server, link: Link, last: bytes) -> None:
    jobs: list[Answer] = []
    talks: list[Answer] = []
    link.expect(jobs.append)
    seq = link.expect(jobs.append)
    thread = threading.Thread(target=lambda: talks.append(failure(lambda: link.call(Ping, Pong, 30))))
    thread.start()
    assert server.peer is not None
    server.peer.recv(100)
    assert not link.close(0.1)
    thread.join(20)
    assert isinstance(talks[0], ServerGoneError)  # at once: a call that waits fails by its deadline
    assert jobs == []
    server.peer.sendall(encode_frame(Error(seq, "cancelled", "stopped")))
    until(jobs)
    assert jobs == [Error(seq, "cancelled", "stopped")]
    server.peer.sendall(last)
    if b"Closed" not in last and b"closed" not in last:
        assert len(jobs) == 1
        server.hang_up()
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


def test_a_server_that_does_not_read_is_told_before_anybody_has_to_wait(server: Server, link: Link) -> None:
    num_sent = 0
    while not link.congested:
        link.send(Ping(num_sent), 0.0)  # never waits while it is not congested
        num_sent += 1
        assert num_sent < 1 << 20
    assert server.peer is not None
    server.peer.settimeout(10)
    received = server.peer.recv(1 << 20)
    while len(received) < num_sent * 4:
        received += server.peer.recv(1 << 20)
    eventually(lambda: not link.congested)


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
            Link(UnixAddress(str(tmp_path / "s")), 5)
        thread.join()


def test_a_greeting_that_never_comes(server: Server, tmp_path: Path) -> None:
    thread = server.greet()
    with pytest.raises(DeadlineError, match="greeting"):
        Link(UnixAddress(str(tmp_path / "s")), 0.1)
    thread.join()
