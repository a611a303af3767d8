"""Connecting and greeting, against servers that are not what they should be."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvferry.client import CacheClient
from kvferry.client.handshake import Greeting, connect, greet
from kvferry.errors import DeadlineError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.address import TcpAddress
from kvferry.protocol.auth import Role, Token
from kvferry.protocol.framing import encode_frame, request_reader
from kvferry.protocol.messages import Challenge, Closed, Error, Hello, Message, Prove, Request, Welcome

TOKEN = Token("a", b"0123456789abcdef")
ID = b"i" * 16


class Script:
    """The server's end of a connection, as a test wants it; `say` runs in a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = request_reader()

    def hear(self) -> Request:
        while (frame := self._reader.next_frame()) is None:
            data = self.socket.recv(1 << 16)
            assert data
            self._reader.feed(data)
        return frame.message

    def say(self, message: Message) -> None:
        self.socket.sendall(encode_frame(message))


@contextlib.contextmanager
def scripted(play: Callable[[Script], None]) -> Iterator[socket.socket]:
    """A socket at whose other end `play` is the server."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    ours.setblocking(False)
    thread = threading.Thread(target=play, args=(Script(theirs),))
    thread.start()
    try:
        yield ours
    finally:
        thread.join(10)
        ours.close()
        theirs.close()


def play_honestly(server: Script) -> None:
    hello = server.hear()
    assert isinstance(hello, Hello)
    assert hello.token_name == "a"
    server.say(Challenge(b"s" * 32))
    proof = server.hear()
    assert isinstance(proof, Prove)
    assert TOKEN.accepts(proof.mac, Role.CLIENT, hello, b"s" * 32)
    server.say(Welcome(2, ID, TOKEN.prove(Role.SERVER, hello, b"s" * 32, 2), 5.0))


def test_both_prove_that_they_have_the_token() -> None:
    with scripted(play_honestly) as sock:
        assert greet(sock, 5, token=TOKEN) == Greeting(2, ID, 5.0)


def play_reflection(server: Script) -> None:
    """A server without the token gives the client's own nonce and proof back."""
    hello = server.hear()
    assert isinstance(hello, Hello)
    server.say(Challenge(hello.nonce))
    proof = server.hear()
    assert isinstance(proof, Prove)
    server.say(Welcome(2, ID, proof.mac))


def play_without_proof(server: Script) -> None:
    server.hear()
    server.say(Welcome(2, ID))


def play_downgrade(server: Script) -> None:
    """Somebody in between changes the version that the server proved."""
    hello = server.hear()
    assert isinstance(hello, Hello)
    server.say(Challenge(b"s" * 32))
    server.hear()
    server.say(Welcome(1, ID, TOKEN.prove(Role.SERVER, hello, b"s" * 32, 2)))


@pytest.mark.parametrize("play", [play_reflection, play_without_proof, play_downgrade])
def test_a_server_that_does_not_prove_itself_is_not_used(play: Callable[[Script], None]) -> None:
    with scripted(play) as sock, pytest.raises(RequestError, match=r"did not prove .*'a'") as caught:
        greet(sock, 5, token=TOKEN)
    assert caught.value.code == "token"


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Error(0, "token", "no such token"), RequestError, r"no such token \[token\]"),
        (Welcome(3, ID), ProtocolError, "protocol 3, this client 1 to 2"),
        (Welcome(0, ID), ProtocolError, "protocol 0"),
        (Closed("the server is stopping"), ProtocolError, "Closed"),
        (Challenge(b"s" * 32), ProtocolError, "Challenge"),
        (Welcome(1, ID, b"", -1.0), ProtocolError, "heartbeat_s"),
        (Welcome(1, b"i" * 65), ProtocolError, "incarnation"),
        (Hello(1, 1), ProtocolError, "does not decode"),
    ],
)
def test_other_answers_are_named_errors(reply: Message, kind: type[Exception], words: str) -> None:
    with scripted(lambda server: server.say(reply)) as sock, pytest.raises(kind, match=words):
        greet(sock, 5)


def test_a_silent_server_and_one_that_hangs_up() -> None:
    with scripted(lambda server: None) as sock, pytest.raises(DeadlineError):
        greet(sock, 0.05)
    for data in (b"", b"\x10\0"):

        def play(server: Script, data: bytes = data) -> None:
            server.hear()
            server.socket.sendall(data)
            server.socket.shutdown(socket.SHUT_WR)

        with scripted(play) as sock, pytest.raises(ServerGoneError, match="hung up"):
            greet(sock, 5)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        connect(TcpAddress("127.0.0.1", port), 5).close()
        connect(TcpAddress("localhost", port), 5).close()  # whatever else that name stands for
    for address in (TcpAddress("127.0.0.1", port), TcpAddress("host.invalid", 1)):
        with pytest.raises(ServerGoneError, match=r"no server answers at tcp://"):
            connect(address, 5)


def test_a_socket_never_takes_itself_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects to a port that nobody listens at may get that very port for its own end, and then an echo."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    real = socket.socket.connect

    def connect_from_there(self: socket.socket, place: tuple[str, int]) -> None:
        self.bind(place)
        real(self, place)

    monkeypatch.setattr(socket.socket, "connect", connect_from_there)
    with pytest.raises(ServerGoneError, match="only this socket itself"):
        connect(TcpAddress("127.0.0.1", port), 5)


def test_a_client_is_told_why_its_token_is_none() -> None:
    with pytest.raises(ValueError, match="name:secret"):
        CacheClient("tcp://127.0.0.1:1", token="no colon in this one")
