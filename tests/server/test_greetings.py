"""Greetings over TCP and on the Unix socket: who has no token gets nowhere, and harms nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client.url import parse_url
from kvferry.protocol.address import TcpAddress
from kvferry.protocol.auth import Role, Token
from kvferry.protocol.framing import MAX_GREETING_BYTES, encode_frame
from kvferry.protocol.messages import (
    NO_SEQ,
    Attach,
    Attached,
    Challenge,
    Closed,
    Error,
    Hello,
    Ping,
    Pong,
    Prove,
    Store,
    Welcome,
)
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.net.admission import MAX_STRANGERS
from serving.process import eventually
from serving.raw import Raw
from serving.tokens import NONCE, TOKENS, TokenServer, challenged, hello_of, token_server, welcomed

A, B = TOKENS["a"], TOKENS["b"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[TokenServer]:
    with token_server(tmp_path) as made:
        yield made


def refusal(raw: Raw) -> Error:
    """The one error that a connection ends with."""
    replies = raw.until_end()
    raw.close()
    errors = [reply for reply in replies if isinstance(reply, Error)]
    assert len(errors) == 1, replies
    assert errors[0].seq == NO_SEQ
    assert not any(isinstance(reply, Welcome) for reply in replies)
    return errors[0]


def test_who_shows_a_token_is_welcome_on_both_sockets(served: TokenServer) -> None:
    for url in (served.tcp, served.path):
        raw = welcomed(url, A)
        raw.send(Ping(3))
        assert raw.reply() == Pong(3)
        raw.close()


def test_heartbeats_are_asked_for_over_tcp_only(served: TokenServer) -> None:
    for url, heartbeat_s in ((served.tcp, 5.0), (served.path, 0.0)):
        raw, nonce = challenged(url, A)
        raw.send(Prove(A.prove(Role.CLIENT, hello_of(A), nonce)))
        welcome = raw.reply()
        assert isinstance(welcome, Welcome)
        assert welcome.heartbeat_s == heartbeat_s
        raw.close()


def test_a_wrong_token_and_an_unknown_one_look_the_same(served: TokenServer) -> None:
    texts = []
    for token in (Token("a", b"x" * 16), Token("nobody", b"x" * 16)):
        raw, nonce = challenged(served.tcp, token)
        raw.send(Prove(token.prove(Role.CLIENT, hello_of(token), nonce)))
        error = refusal(raw)
        assert error.code == "token"
        texts.append(error.text.replace(repr(token.name), "?"))
    assert texts[0] == texts[1]
    assert served.stats()["sessions_refused_token"] == 2


def test_a_proof_is_good_for_its_own_connection_only(served: TokenServer) -> None:
    first, nonce = challenged(served.tcp, A)
    proof = Prove(A.prove(Role.CLIENT, hello_of(A), nonce))
    first.send(proof)
    assert isinstance(first.reply(), Welcome)
    replayed, other_nonce = challenged(served.tcp, A)
    assert other_nonce != nonce
    replayed.send(proof)
    assert refusal(replayed).code == "token"
    first.send(Ping(1))
    assert first.reply() == Pong(1)
    first.close()


def test_what_the_server_proves_is_no_proof_of_a_client(served: TokenServer) -> None:
    """Nonces, and proofs, of one connection sent back in another get nobody in."""
    first, nonce = challenged(served.tcp, A)
    for role, version in ((Role.SERVER, 2), (Role.SERVER, 0), (Role.CLIENT, 2)):
        reflecting, other = challenged(served.tcp, A, nonce)
        reflecting.send(Prove(A.prove(role, hello_of(A, nonce), other, version)))
        assert refusal(reflecting).code == "token"
    reflecting, other = challenged(served.tcp, A, nonce)
    reflecting.send(Prove(A.prove(Role.CLIENT, hello_of(A, other), nonce)))  # the two nonces, the other way round
    assert refusal(reflecting).code == "token"
    first.close()


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([Hello(2, 1)], "token", "asks for a token"),
        ([Hello(1, 1)], "token", "asks for a token"),
        ([Hello(9, 8)], "version", "8 to 9"),
        ([Hello(2, 1, "", "a", b"short")], "protocol", "32 bytes, not 5"),
        ([Prove(b"m" * 32)], "protocol", "must be Hello"),
        ([Ping(1)], "protocol", "must be Hello"),
        ([Attach(1, "e")], "protocol", "must be Hello"),
        ([hello_of(A), hello_of(A)], "protocol", "Hello came in the greeting"),
        ([hello_of(A), Ping(1)], "protocol", "Ping came in the greeting"),
    ],
)
def test_what_is_no_greeting_ends_the_connection(
    served: TokenServer, messages: list[Hello], code: str, words: str
) -> None:
    raw = Raw(served.tcp, *messages)
    error = refusal(raw)
    assert error.code == code
    assert words in error.text


def test_a_second_proof_or_greeting_is_an_error(served: TokenServer) -> None:
    for message in (hello_of(A), Prove(b"m" * 32)):
        raw = welcomed(served.tcp, A)
        raw.send(message)
        error = raw.reply()
        assert isinstance(error, Error)
        assert "after the greeting was over" in error.text
        raw.close()


def test_frames_of_strangers_are_small(served: TokenServer) -> None:
    stranger = Raw(served.tcp)
    stranger.socket.sendall(struct.pack("<I", MAX_GREETING_BYTES + 1))
    error = refusal(stranger)
    assert str(MAX_GREETING_BYTES) in error.text
    on_unix = Raw(served.path)
    on_unix.socket.sendall(struct.pack("<I", MAX_GREETING_BYTES + 1))
    assert refusal(on_unix).code == "protocol"
    friend = welcomed(served.tcp, A)
    friend.send(Store(2, b"k" * MAX_GREETING_BYTES, 0, b""))
    reply = friend.reply()
    assert isinstance(reply, Error)
    assert reply.code == "register"
    friend.close()


@pytest.mark.parametrize("step", range(3))
def test_a_greeting_that_is_not_ended_in_time_ends(served: TokenServer, step: int) -> None:
    """Nothing, half a frame, or no proof; no clock but the server's own counts."""
    if step == 2:
        raw, _ = challenged(served.tcp, A)
    else:
        raw = Raw(served.tcp)
        raw.socket.sendall(encode_frame(hello_of(A))[: step * 20])
        eventually(lambda: served.stats()["sessions"] == 2)
    served.ahead_s = 9.0
    assert served.stats()["sessions"] == 2
    served.ahead_s = 11.0
    error = refusal(raw)
    assert error.code == "silent"
    assert "10 s" in error.text
    served.ahead_s = 0.0
    assert served.stats()["sessions_refused_silent"] == 1


def test_greetings_come_in_any_pieces(served: TokenServer) -> None:
    raw = Raw(served.tcp)
    for byte in encode_frame(hello_of(A)):
        raw.socket.sendall(bytes([byte]))
    challenge = raw.reply()
    assert isinstance(challenge, Challenge)
    proof = encode_frame(Prove(A.prove(Role.CLIENT, hello_of(A), challenge.nonce)))
    raw.socket.sendall(proof + encode_frame(Ping(1))[:3])
    assert isinstance(raw.reply(), Welcome)
    raw.socket.sendall(encode_frame(Ping(1))[3:])
    assert raw.reply() == Pong(1)
    raw.close()


def test_a_friend_that_falls_silent_is_ended_over_tcp_only(served: TokenServer) -> None:
    remote, local = welcomed(served.tcp, A), welcomed(served.path, A)
    served.ahead_s = 14.0
    assert local.stats()["sessions"] == 2  # asked by whoever is known: a stranger's time would be over at once
    served.ahead_s = 16.0
    *_, last = remote.until_end()
    assert last == Closed("nothing was heard of the client for 15 s")
    local.send(Ping(1))
    assert local.reply() == Pong(1)
    stats = local.stats()
    assert (stats["sessions_silent"], stats["sessions_broken"], stats["sessions_refused"]) == (1, 0, 0)
    for raw in (remote, local):
        raw.close()


def test_strangers_do_not_take_the_place_of_friends(tmp_path: Path) -> None:
    with token_server(tmp_path, max_sessions=2, tenant_sessions=2) as served:
        strangers = [Raw(served.tcp) for _ in range(MAX_STRANGERS)]
        friends = [welcomed(served.tcp, A)]  # made room for by the oldest stranger
        assert refusal(strangers[0]).code == "crowded"
        friends.append(welcomed(served.path, A))
        with contextlib.closing(Raw(served.path)) as third:
            assert refusal(third).code == "busy"
        raw, nonce = challenged(served.tcp, A)
        raw.send(Prove(A.prove(Role.CLIENT, hello_of(A), nonce)))
        assert refusal(raw).code == "busy"
        for each in (*strangers, *friends):
            each.close()
        eventually(lambda: len(served.server._parts.sessions) == 0)
        stats = served.stats()
        assert stats["sessions_refused_busy"] == 2
        assert stats["sessions_refused_crowded"] >= 1


def test_a_tenant_does_not_take_the_places_of_others(tmp_path: Path) -> None:
    with token_server(tmp_path, max_sessions=6) as served, contextlib.ExitStack() as stack:
        urls = (served.tcp, served.path, served.tcp)
        greedy = [stack.enter_context(contextlib.closing(welcomed(url, A))) for url in urls]
        for url in (served.tcp, served.path):
            raw, nonce = challenged(url, A)
            stack.enter_context(contextlib.closing(raw))
            raw.send(Prove(A.prove(Role.CLIENT, hello_of(A), nonce)))
            error = refusal(raw)
            assert error.code == "tenant_busy"
            assert "3 sessions of token:a are connected, which is all that tenant_sessions allows" in error.text
        others = [stack.enter_context(contextlib.closing(welcomed(url, B))) for url in urls[:2]]
        assert [raw.stats()["sessions"] for raw in (greedy[0], greedy[2], others[0])] == [3, 3, 2]
        assert served.stats()["sessions_refused_tenant_busy"] == 2
        greedy[0].close()
        eventually(lambda: served.stats()["sessions"] == 5)  # with the one that asks
        stack.enter_context(contextlib.closing(welcomed(served.tcp, A)))


def test_a_user_does_not_take_the_places_of_others(tmp_path: Path) -> None:
    config = ServerConfig(
        socket_path=str(tmp_path / "s"),
        device="cpu",
        memory_bytes=1 << 20,
        max_sessions=5,
        allow_uids=frozenset({4711}),
    )
    with CacheServer(config), contextlib.ExitStack() as stack:
        for _ in range(2):
            raw = stack.enter_context(contextlib.closing(Raw(config.socket_path, Hello(2, 1))))
            assert isinstance(raw.reply(), Welcome)
        third = stack.enter_context(contextlib.closing(Raw(config.socket_path)))
        assert refusal(third).code == "tenant_busy"


def test_each_token_is_a_tenant(served: TokenServer) -> None:
    """An engine of one is not there for another, nor for the same uid without a token."""
    state = served.server._parts.sessions
    raws = [welcomed(served.tcp, A), welcomed(served.path, A), welcomed(served.tcp, B), Raw(served.path, Hello(2, 1))]
    assert isinstance(raws[-1].reply(), Welcome)
    tenants = [session.tenant for session in state._sessions.values()]
    assert sorted(tenants) == sorted(["token:a", "token:a", "token:b", f"uid:{os.getuid()}"])
    for raw in raws:
        raw.send(Attach(1, "e"))
        assert raw.reply() == Attached(1, False)
        raw.close()


def test_a_server_without_tokens_takes_none(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with CacheServer(ServerConfig(socket_path=path, memory_bytes=1 << 20, device="cpu")):
        error = refusal(Raw(path, hello_of(A, NONCE)))
        assert error.code == "token"
        assert "without a token file" in error.text


def hang_up(raw: Raw, how: str) -> None:
    """With a FIN, or with a reset."""
    if how == "reset":
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_peers_that_hang_up_leave_nothing(served: TokenServer, how: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    raws = [Raw(served.tcp), challenged(served.tcp, A)[0], welcomed(served.tcp, A), welcomed(served.path, A)]
    for raw in raws:
        hang_up(raw, how)
    eventually(lambda: served.stats()["sessions"] == 1)
    assert not served.server._parts.sessions._strangers
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_the_address_has_the_real_port(served: TokenServer) -> None:
    address = parse_url(served.tcp)
    assert isinstance(address, TcpAddress)
    assert address.host == "127.0.0.1"
    assert address.port > 0
