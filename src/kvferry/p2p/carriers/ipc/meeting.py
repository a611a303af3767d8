"""How two engines give each other their KV caches over a Unix socket; blocking, each step with a time-out.

visitor (the acceptor of the session)         host (its initiator)
ticket, about, caches                     ->
                                          <-  caches
                                          <-  what kept it from mapping the visitor's; empty: nothing
what kept it from mapping the host's      ->
                                          <-  an empty text: both have all
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvferry.errors import KVFerryError, ShareError, WireError
from kvferry.ipc.fds import recv, send
from kvferry.ipc.peer import credentials
from kvferry.layout import KVLayout
from kvferry.p2p.carriers.ipc.caches import Exported, Layers, PeerCaches
from kvferry.p2p.signal.frames import MAX_MESSAGE_BYTES
from kvferry.p2p.signal.messages import About

STEP_S = 5.0
_LENGTH = struct.Struct("<I")
_MAX_LAYERS_BYTES = 16 << 20
_MAX_TEXT_BYTES = 4096
_T = TypeVar("_T")
_ABOUTS: msgspec.msgpack.Decoder[About] = msgspec.msgpack.Decoder(About)
_LAYERS: msgspec.msgpack.Decoder[tuple[KVLayout, ...]] = msgspec.msgpack.Decoder(Layers)


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """One exchange, by one thread of its own. Both methods raise KVFerryError or OSError where it does not work out."""

    sock: socket.socket
    own: Exported

    def as_visitor(self, own: About, host: About) -> PeerCaches:
        """After the ticket."""
        _send_frame(self.sock, msgspec.msgpack.encode(own))
        self._give()
        peer, problem = self._take(host)
        try:
            theirs = self._hear()
            self._say(problem)
            _raise_for(problem, theirs)
            _raise_for(self._hear(), "")
        except BaseException:
            peer.close()
            raise
        return peer

    def as_host(self, on_met: Callable[[PeerCaches], None]) -> None:
        """`on_met` is called when both have all, before the visitor learns that."""
        peer, problem = self._take(_decoded(_ABOUTS, _recv_frame(self.sock, MAX_MESSAGE_BYTES)))
        try:
            self._give()
            self._say(problem)
            _raise_for(problem, self._hear())
        except BaseException:
            peer.close()
            raise
        on_met(peer)
        self._say("")

    def _give(self) -> None:
        send(self.sock, self.own.wrappers, STEP_S)
        _send_frame(self.sock, msgspec.msgpack.encode(self.own.layers))

    def _take(self, about: About) -> tuple[PeerCaches, str]:
        """The peer's caches, mapped; or why they are not."""
        peer = PeerCaches(about, (), recv(self.sock, STEP_S), self.own)
        try:
            peer.layers = _decoded(_LAYERS, _recv_frame(self.sock, _MAX_LAYERS_BYTES))
            try:
                peer.open()
            except KVFerryError as error:
                return peer, str(error)[:_MAX_TEXT_BYTES] or repr(error)
        except BaseException:
            peer.close()
            raise
        return peer, ""

    def _say(self, text: str) -> None:
        _send_frame(self.sock, text.encode()[:_MAX_TEXT_BYTES])

    def _hear(self) -> str:
        return _recv_frame(self.sock, _MAX_TEXT_BYTES).decode("utf-8", "replace")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"what the peer tells of its KV caches cannot be read: {error}") from None


def check_user(sock: socket.socket) -> None:
    """Raise ShareError where the process at the other end is another user's."""
    uid = credentials(sock).uid
    if uid != os.geteuid():
        raise ShareError(f"the other engine runs as user {uid}, this one as {os.geteuid()}: KV memory is not shared")


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Raises WireError where the peer hangs up, TimeoutError where it is silent."""
    data = bytearray()
    deadline = time.monotonic() + STEP_S
    while len(data) < nbytes:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = sock.recv(min(nbytes - len(data), 1 << 20))
        if not piece:
            raise WireError(f"the other engine hung up after {len(data)} of {nbytes} bytes")
        data += piece
    return bytes(data)


def _send_frame(sock: socket.socket, data: bytes) -> None:
    sock.settimeout(STEP_S)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _recv_frame(sock: socket.socket, max_bytes: int) -> bytes:
    (nbytes,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if nbytes > max_bytes:
        raise WireError(f"a frame of {nbytes} bytes was announced; at most {max_bytes} are read")
    return receive_exactly(sock, nbytes)


def _raise_for(mine: str, theirs: str) -> None:
    if mine:
        raise ShareError(f"the peer's KV caches cannot be mapped here: {mine}")
    if theirs:
        raise ShareError(f"the peer cannot map this engine's KV caches: {theirs}")
