"""Connecting to a cache server: socket and greeting."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from kvferry.errors import DeadlineError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.framing import encode_frame, receive, reply_reader, send_within
from kvferry.protocol.messages import OLDEST_VERSION, PROTOCOL_VERSION, Error, Hello, Welcome

_KNOCK_AGAIN_S = 0.005


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connected, non-blocking socket. Raises ServerGoneError where no server answers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # more clients wait to be accepted than the system lets wait
                if time.monotonic() > deadline:
                    raise
                time.sleep(_KNOCK_AGAIN_S)
    except OSError as error:
        sock.close()
        raise ServerGoneError(
            f"no server answers at {path}: {error}; start one with `kvferry serve`, or check the path"
        ) from error
    return sock


def greet(sock: socket.socket, timeout_s: float) -> bytes:
    """Say hello; the server's incarnation."""
    deadline = time.monotonic() + timeout_s
    reader = reply_reader()
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    try:
        with contextlib.suppress(ConnectionError):  # a server that refuses may have closed already; its reason is read
            send_within(sock, encode_frame(Hello(PROTOCOL_VERSION, OLDEST_VERSION, f"pid {os.getpid()}")), deadline)
        while (frame := reader.next_frame()) is None:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise DeadlineError(f"the server did not answer the greeting within {timeout_s:g} s")
            data, fds = receive(sock)
            if not data:
                raise ServerGoneError("the server hung up on the greeting")
            reader.feed(data, fds)
    except ConnectionError as error:
        raise ServerGoneError(f"the server hung up on the greeting: {error}") from error
    finally:
        reader.close()
    if isinstance(frame.message, Error):
        raise RequestError(frame.message.code, frame.message.text)
    if not isinstance(frame.message, Welcome):
        raise ProtocolError(f"the server answered the greeting with {type(frame.message).__name__}")
    return frame.message.incarnation
