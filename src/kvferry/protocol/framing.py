"""Frames on a stream socket: a length (little-endian u32), then one message as msgpack.

File descriptors come only with an FdBatch on a Unix socket, attached to its first byte. The kernel ends a read after
the bytes that carried descriptors, so those that a read yields belong to the last frame that began in it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from kvferry.errors import DeadlineError, ProtocolError, WireError
from kvferry.ipc.fds import recv_fds, send_fds
from kvferry.protocol.messages import MAX_FDS_A_BATCH, FdBatch, Message, Reply, Request

MAX_FRAME_BYTES = 16 << 20
MAX_GREETING_BYTES = 64 << 10  # a frame of somebody who is not welcome yet
READ_BYTES = 64 << 10  # less than what malloc maps anew each time
_LENGTH = struct.Struct("<I")

# Nested too deeply is none of msgspec's own.
_DECODING_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

_M = TypeVar("_M")
_ENCODER = msgspec.msgpack.Encoder()
_REQUEST_DECODER = msgspec.msgpack.Decoder(Request)


@dataclass(frozen=True, slots=True)
class Frame(Generic[_M]):
    """One message with its file descriptors, which the receiver of the frame owns."""

    message: _M
    fds: tuple[int, ...]


def encode_request(message: Message) -> bytes:
    """The bytes of a request's frame. Raises ValueError where the server would not take it, and end the session."""
    frame = encode_frame(message)
    try:
        _REQUEST_DECODER.decode(memoryview(frame)[_LENGTH.size :])
    except _DECODING_ERRORS as error:
        raise ValueError(f"{type(message).__name__}: {error}") from None
    return frame


def encode_frame(message: Message) -> bytes:
    """The bytes of one frame. Raises ProtocolError where it would be too long."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[_M]):
    """Puts frames together from what a socket gives. Owns descriptors until `next_frame` hands them out.

    Frames longer than `max_bytes`, which may be set at any time, are errors.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[_M]) -> None:
        self.max_bytes = MAX_FRAME_BYTES
        self._decoder = decoder
        self._buffer = bytearray()
        self._start = 0
        self._fds: list[int] = []

    @classmethod
    def _make(cls, kind: object) -> FrameReader[_M]:
        return cls(msgspec.msgpack.Decoder(kind))

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Add what one read gave; takes the descriptors, also when it raises.

        Raises ProtocolError where descriptors come while earlier ones still wait for their frame.
        """
        had_some = bool(self._fds)
        self._fds.extend(fds)
        self._buffer += data
        if had_some and fds:
            raise ProtocolError("file descriptors came before the frame of the ones before them was complete")

    def next_frame(self) -> Frame[_M] | None:
        """The next whole frame, or None where more bytes are needed. Raises ProtocolError for what is no frame."""
        available = len(self._buffer) - self._start
        if available < _LENGTH.size:
            self._need_more(available)
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.max_bytes:
            raise ProtocolError(f"a frame of {length} bytes; at most {self.max_bytes} are allowed")
        begin = self._start + _LENGTH.size
        end = begin + length
        if len(self._buffer) < end:
            self._need_more(available)
            return None
        try:
            message = self._decoder.decode(memoryview(self._buffer)[begin:end])
        except _DECODING_ERRORS as error:
            raise ProtocolError(f"a frame of {length} bytes does not decode: {error}") from None
        self._start = end
        if end == len(self._buffer):
            self._buffer = bytearray()
            self._start = 0
        return Frame(message, self._take_fds(message))

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun to come."""
        return len(self._buffer) > self._start or bool(self._fds)

    def close(self) -> None:
        """Close the descriptors that no frame has taken. Idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _need_more(self, available: int) -> None:
        if self._fds and not available:
            raise ProtocolError(f"{len(self._fds)} file descriptors came with a frame that may not carry any")
        if self._start:
            del self._buffer[: self._start]
            self._start = 0

    def _take_fds(self, message: _M) -> tuple[int, ...]:
        if not isinstance(message, FdBatch):
            return ()
        if len(self._fds) != message.count:
            raise ProtocolError(f"a batch of {message.count} file descriptors came with {len(self._fds)}")
        fds, self._fds = tuple(self._fds), []
        return fds


def request_reader() -> FrameReader[Request]:
    """What the server reads a client's frames with."""
    return FrameReader._make(Request)


def reply_reader() -> FrameReader[Reply]:
    """What a client reads the server's frames with."""
    return FrameReader._make(Reply)


def receive(sock: socket.socket, nbytes: int = READ_BYTES) -> tuple[bytes, list[int]]:
    """One read: bytes (none at the end of the stream) and descriptors, which the caller owns.

    Raises BlockingIOError where a non-blocking socket has nothing, ProtocolError where descriptors were lost.
    """
    try:
        return recv_fds(sock, nbytes, MAX_FDS_A_BATCH)
    except WireError as error:
        raise ProtocolError(str(error)) from None


def send_within(sock: socket.socket, data: bytes, deadline: float, fds: Sequence[int] = ()) -> None:
    """Send all of `data` on a non-blocking socket, with `fds` at its first byte, before `deadline` (`time.monotonic`).

    The descriptors stay the caller's. Raises DeadlineError; the stream is then broken in mid-frame and of no use.
    """
    view = memoryview(data)
    while view:
        with contextlib.suppress(BlockingIOError):
            view = view[send_fds(sock, view, fds) :]
            fds = ()
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"the peer read nothing in time; {len(view)} of {len(data)} bytes were not sent")
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        poller.poll(left * 1e3)
