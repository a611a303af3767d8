"""Sessions: garbage, strangers and clients that do not read harm nobody but themselves."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.errors import ProtocolError, RequestError
from kvferry.ipc.peer import credentials, open_pidfd
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import (
    PROTOCOL_VERSION,
    Attach,
    Closed,
    Confirm,
    Error,
    FdBatch,
    Hello,
    Lookup,
    Ping,
    Pong,
    Stats,
    Store,
    Welcome,
)
from kvferry.server.key_run import KeyRun
from kvferry.server.net.admission import Admission
from serving.engine_side import CHUNK_TOKENS
from serving.process import Stage, Zygote, eventually
from serving.raw import Raw


@pytest.fixture
def raw(stage: Stage) -> Iterator[Raw]:
    made = Raw(stage.path, Hello(1, 1))
    assert isinstance(made.reply(), Welcome)
    yield made
    made.close()


def answers(raw: Raw) -> bool:
    raw.send(Ping(5))
    return raw.reply() == Pong(5)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        frame(b"\xc1" * 10),
        frame(msgspec.msgpack.encode({"type": "nothing", "seq": 1})),
        encode_frame(Pong(1)),
        encode_frame(Hello(1, 1)),
        encode_frame(FdBatch(1, 1)),
        encode_frame(Confirm(1)),
        encode_frame(Attach(1, "e")) + encode_frame(Lookup(2, "r", b"k" * 33)),
    ],
)
def test_a_bad_frame_ends_its_own_session_with_an_error(stage: Stage, raw: Raw, data: bytes) -> None:
    other = Raw(stage.path, Hello(1, 1))
    other.reply()
    raw.socket.sendall(data)
    replies = [reply for reply in raw.until_end() if not isinstance(reply, Pong)]
    errors = [reply for reply in replies if isinstance(reply, Error)]
    assert [error.code for error in errors] == ["protocol"]
    assert isinstance(replies[-1], Closed)
    assert answers(other)
    other.close()


def test_the_first_frame_is_hello(stage: Stage) -> None:
    stranger = Raw(stage.path, Ping(1))
    error = stranger.reply()
    assert isinstance(error, Error)
    assert "must be Hello" in error.text
    stranger.close()


def test_another_version_is_refused_with_both(stage: Stage) -> None:
    future = Raw(stage.path, Hello(9, 8))
    error = future.reply()
    assert isinstance(error, Error)
    assert "8 to 9" in error.text
    assert "1 to 2" in error.text
    future.close()
    newer = Raw(stage.path, Hello(9, 1))
    welcome = newer.reply()
    assert isinstance(welcome, Welcome)
    assert welcome.version == PROTOCOL_VERSION
    newer.close()


def test_requests_that_cannot_be_served_leave_the_session_alive(raw: Raw) -> None:
    for message, code in (
        (Lookup(2, "r", b""), "attach"),
        (Store(3, b"k" * 32, 0, b""), "register"),
    ):
        raw.send(message)
        error = raw.reply()
        assert isinstance(error, Error)
        assert (error.seq, error.code) == (message.seq, code)
    assert answers(raw)


def test_descriptors_out_of_place_are_closed(stage: Stage, raw: Raw) -> None:
    watcher = stage.engine(register={})
    before = stage.server.fds()
    for _ in range(3):
        stranger = Raw(stage.path, Hello(1, 1))
        stranger.reply()
        fd = os.memfd_create("stray")
        socket.send_fds(stranger.socket, [encode_frame(Ping(1))], [fd] * 100)
        os.close(fd)
        assert any(isinstance(reply, Error) for reply in stranger.until_end())
        stranger.close()
    eventually(lambda: watcher.call("stats")["stats"]["sessions"] == 2)
    assert stage.server.fds() == before
    assert answers(raw)


def test_a_client_that_does_not_read_is_dropped_and_others_are_served(stage: Stage, raw: Raw) -> None:
    lazy = Raw(stage.path, Hello(1, 1))
    lazy.socket.setblocking(False)
    burst = b"".join(encode_frame(Stats(number)) for number in range(1000))
    deadline = time.monotonic() + 20
    dropped = False
    while not dropped and time.monotonic() < deadline:
        try:
            lazy.socket.send(burst)
        except BlockingIOError:
            assert answers(raw)
        except (ConnectionResetError, BrokenPipeError):
            dropped = True
    assert dropped
    assert answers(raw)
    lazy.close()


def test_too_many_sessions_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, max_sessions=2)
    try:
        kept = [Raw(stage.path, Hello(1, 1)) for _ in range(2)]
        assert all(isinstance(client.reply(), Welcome) for client in kept)
        third = Raw(stage.path)
        error = third.reply()
        assert isinstance(error, Error)
        assert error.code == "busy"
        for client in (*kept, third):
            client.close()
        eventually(lambda: is_welcome(stage.path))
    finally:
        stage.close()


def is_welcome(path: str) -> bool:
    client = Raw(path, Hello(1, 1))
    reply = client.reply()
    client.close()
    return isinstance(reply, Welcome)


def test_the_socket_is_the_owners_only(stage: Stage) -> None:
    assert os.stat(stage.path).st_mode & 0o777 == 0o600


def test_another_uid_is_refused_with_both_named() -> None:
    admission = Admission(own_uid=1000, allow_uids={1001}, max_sessions=1, tenant_sessions=1)
    admission.check_uid(1000, ())
    admission.check_uid(1001, ())
    with pytest.raises(RequestError, match=r"uid 1000 .*uid 1002"):
        admission.check_uid(1002, (0, 1000))
    grouped = Admission(own_uid=1000, group_id=7, max_sessions=1, tenant_sessions=1)
    grouped.check_uid(1002, (5, 7))
    with pytest.raises(RequestError, match=r"uid 1002 .*group 7"):
        grouped.check_uid(1002, (5,))


def test_the_peer_is_known_by_the_kernel() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert credentials(left) == (os.getpid(), os.getuid(), os.getgid())
        pidfd = open_pidfd(left)
        assert pidfd is not None
        os.close(pidfd)


def test_keys_are_whole() -> None:
    keys = KeyRun(b"a" * 32 + b"b" * 32)
    assert list(keys) == keys[:] == [b"a" * 32, b"b" * 32]
    with pytest.raises(ProtocolError):
        KeyRun(b"a" * 31)


def test_sessions_at_the_same_time_get_their_own_answers(stage: Stage) -> None:
    engines = [stage.engine(register={"engine_id": f"e{number}"}) for number in range(4)]
    stage.wait_for_memory(engines[0])
    digests = [
        engine.call("fill", blocks=list(range(16)), seed=number)["digest"] for number, engine in enumerate(engines)
    ]
    for _ in range(3):
        for number, engine in enumerate(engines):
            engine.ask("store", seed=number, num_tokens=4 * CHUNK_TOKENS, blocks=list(range(16)))
        for engine in engines:
            engine.answer()
        founds = [
            engine.call("lookup", seed=number, num_tokens=4 * CHUNK_TOKENS) for number, engine in enumerate(engines)
        ]
        for engine, found in zip(engines, founds, strict=True):
            engine.ask("retrieve", lease=found["lease"], blocks=list(range(32, 48)))
        assert [engine.answer()["failed"] for engine in engines] == [[]] * 4
        got = [engine.call("digest", blocks=list(range(32, 48)))["digest"] for engine in engines]
        assert got == digests
