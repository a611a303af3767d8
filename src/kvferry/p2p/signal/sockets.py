"""The ZMQ sockets of one engine: a ROUTER where it listens, a DEALER for each address that it talks to."""

from __future__ import annotations

import contextlib
import hmac
import socket
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvferry.errors import ShareError, TransferError
from kvferry.p2p.signal.frames import MAX_MESSAGE_BYTES
from kvferry.settings import join_host_port, split_host_port

_UNREAD = 256  # messages of a peer
_UNSENT = 4096  # own messages to a peer: mostly small, and a busy machine sends them later than they come
_MAX_FRAMES = 2
_ZAP = "inproc://zeromq.zap.01"


def resolved(address: str) -> str:
    """The address with a number for its host's name. Waits for the name server where it is one.

    Raises TransferError ("bad_address") for what is no address.
    """
    try:
        host, port = split_host_port(address)
        number = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except (ValueError, OSError) as error:
        raise TransferError("bad_address", f"{address!r} is no address to use: {error}") from None
    return join_host_port(str(number), port)


class _Curve(NamedTuple):
    """One pair of keys, which all engines have."""

    public: bytes
    secret: bytes
    public_raw: bytes

    @classmethod
    def of(cls, secret_key: str) -> _Curve:
        try:
            secret = secret_key.encode("ascii")
            public = zmq.curve_public(secret)
            return cls(public, secret, z85.decode(public))
        except (ValueError, zmq.ZMQError) as error:
            raise ValueError(f"the CURVE secret key is none: {type(error).__name__}") from None

    def apply(self, sock: zmq.Socket[bytes], *, serves: bool) -> None:
        """Before the socket is bound or connected."""
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        if serves:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.ZAP_DOMAIN, b"kvferry")
        else:
            sock.setsockopt(zmq.CURVE_SERVERKEY, self.public)


class Sockets:
    """For the loop's thread alone, but for the constructor. No call waits."""

    def __init__(self, address: str, curve_secret_key: str | None = None) -> None:
        """Raises ShareError where nothing can listen at the address, ValueError for what is no key."""
        host, port = split_host_port(address)
        self._curve = None if curve_secret_key is None else _Curve.of(curve_secret_key)
        self.context = zmq.Context()
        self.doorman: zmq.Socket[bytes] | None = None
        if self._curve is not None:  # before anything listens: without it everybody would be let in
            self.doorman = self.context.socket(zmq.REP)
            self.doorman.bind(_ZAP)
        self.router = self._new(zmq.ROUTER, resolved(address))
        # A message for a peer that is gone, or does not read, is an error and not lost in silence.
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.router.bind(f"tcp://{resolved(address)}" if port else f"tcp://{resolved(address)[:-1]}*")
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            hint = "choose another port, or 0 for any that is free"
            raise ShareError(f"cannot listen at {address}: {error}; {hint}") from None
        endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host, self.port = split_host_port(endpoint.rstrip("\0").removeprefix("tcp://"))
        self._published = socket.gethostname() if self.host in ("0.0.0.0", "::") else host

    @property
    def address(self) -> str:
        """Where peers reach this engine: the host as it was given, the real port."""
        return join_host_port(self._published, self.port)

    def connect(self, address: str) -> zmq.Socket[bytes]:
        """A DEALER to a resolved address; ZMQ goes on trying. Raises TransferError where it cannot even try."""
        dealer = self._new(zmq.DEALER, address)
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            dealer.close()
            raise TransferError("bad_address", f"cannot connect to {address!r}: {error}") from None
        return dealer

    def answer_doorman(self) -> None:
        """Say of each who comes whether it has the key (ZeroMQ's authentication protocol, ZAP 1.0)."""
        assert self.doorman is not None
        assert self._curve is not None
        while (parts := receive(self.doorman)) is not None:
            version, request, key = parts[0], parts[1], parts[6] if len(parts) == 7 else b""
            known = hmac.compare_digest(key, self._curve.public_raw)
            verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
            self.doorman.send_multipart([version, request, *verdict, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        """What has been queued for sending has a moment to go. Idempotent."""
        self.context.destroy(linger=200)

    def _new(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.SNDHWM, _UNSENT)
        made.setsockopt(zmq.RCVHWM, _UNREAD)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._curve is not None:
            self._curve.apply(made, serves=kind == zmq.ROUTER)
        made.setsockopt(zmq.IPV6, int("[" in address))
        return made


def receive(sock: zmq.Socket[bytes]) -> list[bytes] | None:
    """The parts of the next message, None where there is none."""
    try:
        return sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def send(sock: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    """Whether the message was taken: not where the peer is gone, or leaves its messages unread."""
    assert len(parts) <= _MAX_FRAMES
    with contextlib.suppress(zmq.ZMQError):
        sock.send_multipart(parts, zmq.NOBLOCK)
        return True
    return False
