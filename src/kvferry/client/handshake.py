"""Connecting to a cache server: socket and greeting."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import stat
import time
from typing import NamedTuple

from kvferry.errors import DeadlineError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.address import Address, TcpAddress, UnixAddress
from kvferry.protocol.auth import Role, Token
from kvferry.protocol.framing import encode_frame, receive, reply_reader, send_within
from kvferry.protocol.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    TOKEN_NONCE_BYTES,
    Challenge,
    Error,
    Hello,
    Message,
    Prove,
    Reply,
    Welcome,
)
from kvferry.protocol.tcp import tune

_KNOCK_AGAIN_S = 0.005


class Greeting(NamedTuple):
    """What was settled: the version spoken, and how often either side has to be heard (0 where it has not)."""

    version: int
    incarnation: bytes
    heartbeat_s: float


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connected, non-blocking socket. Raises ServerGoneError where no server answers, or we may not ask."""
    deadline = time.monotonic() + timeout_s
    try:
        if isinstance(address, UnixAddress):
            return _connect_unix(address.path, deadline)
        return _connect_tcp(address, deadline)
    except OSError as error:
        if isinstance(error, PermissionError) and isinstance(address, UnixAddress):
            raise ServerGoneError(f"{_locked_out(address.path)}: {error}") from error
        raise ServerGoneError(
            f"no server answers at {address}: {error}; start one with `kvferry serve`, or check the address"
        ) from error


def _locked_out(path: str) -> str:
    """What to say of a socket that the system does not let us open."""
    uid = os.geteuid()
    try:
        status = os.stat(path)
    except OSError:
        return f"a server may be at {path}, but uid {uid} may not enter its folder; open that to it"
    return (
        f"a server may be there, but uid {uid} may not open the socket {path} (owner: uid {status.st_uid}, "
        f"group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):o}); "
        f"start the server with --allow-uid {uid} or --socket-group"
    )


def _connect_unix(path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # more clients wait to be accepted than the system lets wait
                if time.monotonic() > deadline:
                    raise
                time.sleep(_KNOCK_AGAIN_S)
    except BaseException:
        sock.close()
        raise


def _connect_tcp(address: TcpAddress, deadline: float) -> socket.socket:
    """Try all that the name stands for, one after the other. (The system's resolver has time limits of its own.)"""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for tried, (family, kind, protocol, _, place) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            left = max(0.0, deadline - time.monotonic())
            sock.settimeout(left / (len(found) - tried) or _KNOCK_AGAIN_S)
            sock.connect(place)
            if sock.getsockname() == sock.getpeername():  # nobody listens, and the system chose that port for our end
                raise ConnectionRefusedError("there is only this socket itself")
            tune(sock)
            sock.setblocking(False)
            return sock
        except OSError:
            sock.close()
            if tried == len(found) - 1:
                raise
        except BaseException:
            sock.close()
            raise
    raise OSError("the name stands for no address")


def greet(sock: socket.socket, timeout_s: float, *, token: Token | None = None) -> Greeting:
    """Say hello, with a token also who one is; the server then proves that it has the token, too.

    Raises RequestError where the server refuses, or does not have the token; ProtocolError, DeadlineError,
    ServerGoneError.
    """
    hello = Hello(PROTOCOL_VERSION, OLDEST_VERSION, f"pid {os.getpid()}")
    if token is not None:
        hello = Hello(hello.version, hello.oldest, hello.client, token.name, secrets.token_bytes(TOKEN_NONCE_BYTES))
    server_nonce = b""
    with contextlib.closing(_Talk(sock, time.monotonic() + timeout_s)) as talk:
        answer = talk.ask(hello)
        if token is not None and isinstance(answer, Challenge):
            server_nonce = answer.nonce
            answer = talk.ask(Prove(token.prove(Role.CLIENT, hello, server_nonce)))
    if isinstance(answer, Error):
        raise RequestError(answer.code, answer.text)
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"the server answered the greeting with {type(answer).__name__}")
    if not OLDEST_VERSION <= answer.version <= PROTOCOL_VERSION:
        raise ProtocolError(
            f"the server wants to speak protocol {answer.version}, this client {OLDEST_VERSION} to {PROTOCOL_VERSION}"
        )
    if token is not None and not token.accepts(answer.mac, Role.SERVER, hello, server_nonce, answer.version):
        raise RequestError("token", f"the server did not prove that it has token {token.name!r}: it is not to be used")
    return Greeting(answer.version, answer.incarnation, answer.heartbeat_s)


class _Talk:
    """Frames to and fro on a socket that nobody else reads yet."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._deadline = deadline
        self._reader = reply_reader()
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def ask(self, message: Message) -> Reply:
        """Send a frame, and give the next one that comes."""
        try:
            with contextlib.suppress(ConnectionError):  # a server that refuses may have closed; its reason is read
                send_within(self._socket, encode_frame(message), self._deadline)
            while (frame := self._reader.next_frame()) is None:
                if not self._poller.poll(max(0.0, self._deadline - time.monotonic()) * 1e3):
                    raise DeadlineError("the server did not answer the greeting in time")
                data, fds = receive(self._socket)
                if not data:
                    raise ServerGoneError("the server hung up on the greeting")
                self._reader.feed(data, fds)
        except ConnectionError as error:
            if isinstance(error, ServerGoneError):
                raise
            raise ServerGoneError(f"the server hung up on the greeting: {error}") from error
        return frame.message

    def close(self) -> None:
        self._reader.close()
