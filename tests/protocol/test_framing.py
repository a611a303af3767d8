"""Frames: whole or an error, whatever arrives; descriptors never leak."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import DeadlineError, ProtocolError
from kvferry.ipc.events import Ticket
from kvferry.protocol.framing import (
    MAX_FRAME_BYTES,
    Frame,
    FrameReader,
    encode_frame,
    receive,
    reply_reader,
    request_reader,
    send_within,
)
from kvferry.protocol.messages import FdBatch, Found, Hello, Lookup, Message, Ping, Request, Retrieve, Store

EXAMPLES: list[Message] = [
    Hello(1, 1, "test"),
    Ping(7),
    Lookup(1, "request", b"k" * 64),
    Store(2, b"k" * 32, 0, b"\0" * 16, Ticket(3, 4), 1.5),
    Retrieve(3, 99, b"\0" * 16),
    Retrieve(3, 99, b"\0" * 16, 4, None, 2.0, 256),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def read_all(reader: FrameReader[Request], data: bytes, step: int) -> list[Request]:
    found: list[Request] = []
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
        while (frame := reader.next_frame()) is not None:
            assert frame.fds == ()
            found.append(frame.message)
    return found


@pytest.mark.parametrize("step", [1, 3, 5, 1000])
def test_frames_survive_any_cut(step: int) -> None:
    data = b"".join(map(encode_frame, EXAMPLES))
    assert read_all(request_reader(), data, step) == EXAMPLES


def test_replies_and_requests_are_apart() -> None:
    reader = reply_reader()
    reader.feed(encode_frame(Found(1, 64, 5)))
    frame = reader.next_frame()
    assert frame is not None
    assert frame.message == Found(1, 64, 5)
    reader.feed(encode_frame(Ping(1)))
    with pytest.raises(ProtocolError, match="does not decode"):
        reader.next_frame()


def test_an_unknown_field_is_ignored() -> None:
    body = msgspec.msgpack.encode({"type": "ping", "seq": 3, "later": True})
    assert read_all(request_reader(), struct.pack("<I", len(body)) + body, 1000) == [Ping(3)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "pong", "seq": 1}),
        msgspec.msgpack.encode({"type": "ping", "seq": -1}),
        msgspec.msgpack.encode({"type": "ping", "seq": 1 << 63}),
        msgspec.msgpack.encode({"type": "lookup", "seq": 1, "request_id": "", "keys": b""}),
        msgspec.msgpack.encode({"type": "lookup", "seq": 1, "request_id": "r", "keys": "text"}),
        msgspec.msgpack.encode({"type": "fd_batch", "seq": 1, "count": 129}),
        msgspec.msgpack.encode({"type": "retrieve", "seq": 1, "lease_id": 1, "block_ids": b"", "stages": 0}),
        msgspec.msgpack.encode({"type": "retrieve", "seq": 1, "lease_id": 1, "block_ids": b"", "stages": 257}),
        msgspec.msgpack.encode(["ping", 1]),
    ],
)
def test_what_is_no_request_is_an_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_all(request_reader(), struct.pack("<I", len(body)) + body, 1000)


def test_lengths_are_bounded_before_anything_is_kept() -> None:
    reader = request_reader()
    reader.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most"):
        reader.next_frame()
    with pytest.raises(ProtocolError, match="a frame holds"):
        encode_frame(Store(1, b"", 0, b"x" * (MAX_FRAME_BYTES + 1)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_gives_a_named_error_or_waits(data: bytes) -> None:
    try:
        read_all(request_reader(), data, 7)
    except ProtocolError:
        return


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EXAMPLES), st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_a_named_error_or_another_message(message: Message, place: int, value: int) -> None:
    data = bytearray(encode_frame(message))
    data[4 + place % (len(data) - 4)] = value
    try:
        (found,) = read_all(request_reader(), bytes(data), 1000)
    except ProtocolError:
        return
    assert isinstance(found, Message)


def test_descriptors_come_with_their_batch(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    before = count_fds()
    sent = [os.memfd_create(str(number)) for number in range(3)]
    send_within(left, encode_frame(Ping(1)), time.monotonic() + 5)
    send_within(left, encode_frame(FdBatch(2, 3)), time.monotonic() + 5, sent)
    send_within(left, encode_frame(Ping(3)), time.monotonic() + 5)
    reader = request_reader()
    frames: list[Frame[Request]] = []
    while len(frames) < 3:
        reader.feed(*receive(right))
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
    assert [frame.message for frame in frames] == [Ping(1), FdBatch(2, 3), Ping(3)]
    assert [len(frame.fds) for frame in frames] == [0, 3, 0]
    received = frames[1].fds
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in sent]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*sent, *received):
        os.close(fd)
    assert count_fds() == before


@pytest.mark.parametrize("message", [Ping(1), FdBatch(1, 2), FdBatch(1, 1)])
def test_unexpected_descriptors_are_closed(pair: tuple[socket.socket, socket.socket], message: Message) -> None:
    left, right = pair
    before = count_fds()
    sent = [os.memfd_create("x") for _ in range(1 if message == FdBatch(1, 2) else 2)]
    send_within(left, encode_frame(message), time.monotonic() + 5, sent)
    reader = request_reader()
    reader.feed(*receive(right))
    with pytest.raises(ProtocolError, match="file descriptors"):
        list(iter(reader.next_frame, None))
    reader.close()
    for fd in sent:
        os.close(fd)
    assert count_fds() == before


def test_too_many_descriptors_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    before = count_fds()
    fd = os.memfd_create("x")
    send_within(left, encode_frame(Ping(1)), time.monotonic() + 5, [fd] * 200)
    with pytest.raises(ProtocolError, match="more than the 128"):
        receive(right)
    os.close(fd)
    assert count_fds() == before


def test_a_peer_that_does_not_read_ends_the_send(pair: tuple[socket.socket, socket.socket]) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        send_within(pair[0], bytes(MAX_FRAME_BYTES), time.monotonic() + 0.1)
    assert time.monotonic() - started < 2


def test_the_end_of_the_stream_is_no_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert receive(pair[1]) == (b"", [])
