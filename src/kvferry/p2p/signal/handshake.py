"""The handshake of a session, step by step, on both sides. No sockets: messages in, messages out.

Each step raises TransferError where the other side is not to be talked to; its code goes into the Goodbye.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass

import msgspec

from kvferry.errors import LayoutError, TransferError
from kvferry.p2p.geometry import check_compatible, check_geometry
from kvferry.p2p.signal.auth import Role, accepts, prove
from kvferry.p2p.signal.messages import (
    NONCE_BYTES,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    About,
    Challenge,
    Hello,
    Introduce,
    Welcome,
)

HOST_CARRIER = "host"
IPC_CARRIER = "ipc"
NCCL_CARRIER = "nccl"
TICKET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Self:
    """This engine in handshakes. `about.carriers` are those that it can use, the best first."""

    instance: bytes
    secret: bytes | None
    about: About

    def offering(self, carriers: tuple[str, ...], device_uuid: str) -> Self:
        """The same with other carriers, on the GPU with that UUID, or "" for the host."""
        about = msgspec.structs.replace(self.about, carriers=carriers, device_uuid=device_uuid)
        return dataclasses.replace(self, about=about)


class Initiator:
    """The side that opens the session."""

    def __init__(self, own: Self) -> None:
        self._own = own
        self._nonce = os.urandom(NONCE_BYTES)
        self.peer: bytes | None = None
        self.ticket = b""  # what the acceptor shows where the two meet beside ZMQ; once it has proved itself

    def hello(self) -> Hello:
        return Hello(oldest=OLDEST_VERSION, version=PROTOCOL_VERSION, nonce=self._nonce)

    def on_challenge(self, message: Challenge) -> Introduce:
        """The acceptor proves that it has the token, so it may know who we are."""
        if not OLDEST_VERSION <= message.version <= PROTOCOL_VERSION:
            raise _other_version(message.version, message.version)
        self.peer = message.sender
        parts = self._own.instance, message.sender, self._nonce, message.nonce
        if not accepts(self._own.secret, Role.ACCEPTOR, parts, message.mac):
            raise TransferError("refused", "the acceptor does not have this engine's token")
        self.ticket = _ticket(parts)
        about = self._own.about
        return Introduce(about=about, mac=prove(self._own.secret, Role.INITIATOR, (*parts, _packed(about))))

    def on_welcome(self, message: Welcome) -> None:
        """The acceptor has chosen a carrier."""
        _check_peer(self._own.about, message.about)
        if message.carrier not in self._own.about.carriers:
            raise TransferError("refused", f"the acceptor chose carrier {message.carrier!r}, which is not offered")


class Acceptor:
    """The side that is asked."""

    def __init__(self, own: Self) -> None:
        self._own = own
        self._nonce = os.urandom(NONCE_BYTES)
        self._parts: tuple[bytes, ...] = ()  # what both have said, the initiator's first
        self.peer: bytes | None = None
        self.ticket = b""  # as the initiator has it

    def on_hello(self, message: Hello) -> Challenge:
        if message.oldest > PROTOCOL_VERSION or message.version < OLDEST_VERSION:
            raise _other_version(message.oldest, message.version)
        self.peer = message.sender
        self._parts = message.sender, self._own.instance, message.nonce, self._nonce
        self.ticket = _ticket(self._parts)
        mac = prove(self._own.secret, Role.ACCEPTOR, self._parts)
        return Challenge(version=min(message.version, PROTOCOL_VERSION), nonce=self._nonce, mac=mac)

    def on_introduce(self, message: Introduce) -> str:
        """The carrier to use with a peer that has proved itself and that fits."""
        if not accepts(self._own.secret, Role.INITIATOR, (*self._parts, _packed(message.about)), message.mac):
            raise TransferError("refused", "the initiator does not have this engine's token")
        _check_peer(self._own.about, message.about)
        return choose_carrier(self._own.about, message.about)


def choose_carrier(mine: About, theirs: About, tried: str = "") -> str:
    """The first of my carriers, but for one that was `tried`, that both have and their places allow.

    Raises TransferError.
    """
    common = [name for name in mine.carriers if name in theirs.carriers and name != tried]
    same_host = mine.host_id == theirs.host_id
    same_device = same_host and mine.device_uuid == theirs.device_uuid != ""
    for name in common:
        if not ((name == IPC_CARRIER and not same_host) or (name == NCCL_CARRIER and same_device)):
            return name
    why = ""
    if NCCL_CARRIER in common and same_device:
        why = f"; both use GPU {mine.device_uuid}, over which NCCL cannot connect two ranks: use carrier ipc or host"
    raise TransferError(
        "no_carrier",
        f"carriers {', '.join(mine.carriers)} here and {', '.join(theirs.carriers)} there have none to use{why}",
    )


def _check_peer(mine: About, theirs: About) -> None:
    try:
        if theirs.geometry is not None:
            check_geometry(theirs.geometry)
        check_compatible(mine, theirs)
    except LayoutError as error:
        raise TransferError("mismatch", str(error)) from None


def _other_version(oldest: int, newest: int) -> TransferError:
    theirs = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
    return TransferError("version", f"protocol {theirs} there, {OLDEST_VERSION} to {PROTOCOL_VERSION} here")


def _ticket(parts: tuple[bytes, ...]) -> bytes:
    """What only those two know that have greeted each other."""
    return hashlib.sha256(b"kvferry p2p ticket" + b"".join(parts)).digest()


def _packed(about: About) -> bytes:
    return msgspec.msgpack.encode(about)
