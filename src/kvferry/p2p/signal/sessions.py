"""All sessions of an engine: made, kept alive, ended."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from functools import partial

import msgspec

from kvferry.errors import PeerGoneError, TransferError, WireError
from kvferry.p2p.signal.frames import decode_message, encode_message
from kvferry.p2p.signal.handshake import IPC_CARRIER, Acceptor, Initiator, Self, choose_carrier
from kvferry.p2p.signal.loop import Loop
from kvferry.p2p.signal.messages import (
    NONCE_BYTES,
    AnyMessage,
    Beat,
    Challenge,
    Goodbye,
    Hello,
    Introduce,
    Message,
    Welcome,
)
from kvferry.p2p.signal.neighbours import Links, Listener, Mapper
from kvferry.p2p.signal.session import Session, State
from kvferry.p2p.signal.sockets import Sockets, receive, send
from kvferry.settings import split_host_port

_LOG = logging.getLogger(__name__)
_BEATS = 3
_MAX_GREETING = 256
_MESSAGES_A_TURN = 64


class Sessions:
    """For the loop's thread."""

    def __init__(self, own: Self, sockets: Sockets, links: Links, *, heartbeat_s: float, set_up_s: float) -> None:
        self.own = own
        self._sockets = sockets
        self._links = links
        self._heartbeat_s = heartbeat_s
        self._set_up_s = set_up_s
        self._by_identity: dict[bytes, Session] = {}
        self._by_address: dict[str, Session] = {}
        self.counters: Counter[str] = Counter()
        self.mapper: Mapper | None = None
        self._listener: Listener | None = None
        self._loop: Loop | None = None

    @property
    def now(self) -> float:
        return time.monotonic()

    def begin(self, loop: Loop, listener: Listener) -> None:
        """Before the loop starts."""
        self._loop, self._listener = loop, listener
        loop.watch(self._sockets.router, self._on_router)
        if self._sockets.doorman is not None:
            loop.watch(self._sockets.doorman, self._sockets.answer_doorman)

    def all(self) -> list[Session]:
        """Those that are up, or on their way."""
        return [*self._by_identity.values(), *self._by_address.values()]

    def open(self, address: str) -> Session:
        """The session to an address, which may still have to come up. Raises TransferError for what is no address."""
        found = self._by_address.get(address)
        if found is not None:
            return found
        dealer = self._sockets.connect(address)
        initiator = Initiator(self.own)
        session = Session(dealer, None, address, initiator, self.own.about, self.now)
        session.set_up_by = self.now + self._set_up_s
        self._by_address[address] = session
        assert self._loop is not None
        self._loop.watch(dealer, partial(self._on_dealer, session))
        self.send(session, initiator.hello())
        return session

    def send(self, session: Session, message: Message) -> None:
        """Nothing happens where the session has ended; one that does not take it is ended."""
        if session.ended:
            return
        session.said_at = self.now
        if not self._put(session, message):
            self.end(session, PeerGoneError("peer_gone", f"{session!r} takes no messages any more"))

    def end(self, session: Session, error: TransferError, *, tell: bool = False) -> None:
        """End it; `tell` the peer why. Idempotent."""
        if session.ended:
            return
        text = error.text.removeprefix(f"{session!r}: ")  # the peer's own name for the session goes before it there
        session.state = State.ENDED
        if tell:
            self._put(session, Goodbye(code=error.code, text=text))
        if session.identity is not None:
            self._by_identity.pop(session.identity, None)
        if session.address is not None:
            self._by_address.pop(session.address, None)
            assert self._loop is not None
            self._loop.forget(session.socket)
            session.socket.close(linger=200 if tell else 0)
        self._links.drop(session)
        self._unmapped(session)
        assert self._listener is not None
        self._listener.session_lost(session, error)

    def link_up(self, session: Session) -> None:
        """The link is there; on the acceptor's side the peer has shown its ticket."""
        if session.state is State.LINKING:
            session.state = State.UP
            session.heard_at = self.now
            if session.address is None:
                self._links.confirm(session)
            assert self._listener is not None
            self._listener.session_up(session)

    def link_lost(self, session: Session, reason: str) -> None:
        """The link has ended, and with it the session."""
        self.end(session, PeerGoneError("peer_gone", f"{session!r}: {reason}"), tell=True)

    def tick(self) -> float:
        """Beats, and time-outs; returns when to come again."""
        next_at = math.inf
        for session in self.all():
            if session.state is not State.UP:
                if self.now >= session.set_up_by:
                    why = f"{session!r} did not come up within {self._set_up_s:g} s{_silence(session)}"
                    self.end(session, PeerGoneError("unreachable", why), tell=True)
                next_at = min(next_at, session.set_up_by)
                continue
            if self.now - session.heard_at > _BEATS * self._heartbeat_s:
                why = f"{session!r}: nothing was heard for {_BEATS * self._heartbeat_s:g} s"
                self.end(session, PeerGoneError("peer_gone", why), tell=True)
                continue
            if self.now - session.said_at >= self._heartbeat_s:
                self.send(session, Beat())
            next_at = min(next_at, session.said_at + self._heartbeat_s)
        return next_at

    def _put(self, session: Session, message: Message) -> bool:
        """Whether the socket took it."""
        stamped = msgspec.structs.replace(message, sender=self.own.instance, receiver=session.peer)
        data = encode_message(stamped)
        return send(session.socket, [data] if session.identity is None else [session.identity, data])

    def _on_dealer(self, session: Session) -> None:
        for _ in range(_MESSAGES_A_TURN):
            parts = receive(session.socket) if not session.ended else None
            if parts is None:
                return
            self._on_frame(session, parts[0] if len(parts) == 1 else b"")

    def _on_router(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            parts = receive(self._sockets.router)
            if parts is None:
                return
            session = self._by_identity.get(parts[0])
            data = parts[1] if len(parts) == 2 else b""
            if session is not None:
                self._on_frame(session, data)
            else:
                self._on_stranger(parts[0], data)

    def _on_stranger(self, identity: bytes, data: bytes) -> None:
        """A first message, or one for a session that is gone."""
        message = self._decoded(data)
        if message is None:
            return
        if not isinstance(message, Hello):
            self.counters["late"] += 1
            if not isinstance(message, Goodbye):
                gone = Goodbye(
                    sender=self.own.instance, receiver=message.sender, code="peer_gone", text="no such session"
                )
                send(self._sockets.router, [identity, encode_message(gone)])
            return
        greeting = [session for session in self._by_identity.values() if session.state is State.GREETING]
        if len(greeting) >= _MAX_GREETING:
            self.end(greeting[0], TransferError("busy", "too many engines are greeting at once"), tell=True)
        session = Session(self._sockets.router, identity, None, Acceptor(self.own), self.own.about, self.now)
        session.set_up_by = self.now + self._set_up_s
        self._by_identity[identity] = session
        self._handle(session, message)

    def _on_frame(self, session: Session, data: bytes) -> None:
        message = self._decoded(data)
        if message is None:
            self.end(session, TransferError("malformed", "a message could not be read"), tell=True)
            return
        known = session.peer if any(session.peer) else message.sender
        if message.sender != known or message.receiver != self.own.instance:
            self.counters["late"] += 1  # of, or for, an engine that had this address before
            return
        self._handle(session, message)

    def _handle(self, session: Session, message: AnyMessage) -> None:
        session.heard_at = self.now
        try:
            if isinstance(message, Goodbye):
                self.end(session, PeerGoneError(message.code, f"{session!r}: the peer says: {message.text}"))
            elif isinstance(message, Hello | Challenge | Introduce | Welcome):
                self._greet(session, message)
            elif isinstance(message, Beat) and session.state is State.LINKING:
                pass  # the peer has seen the link come up, of which this side is still to hear
            elif session.state is not State.UP:
                raise TransferError("protocol", f"a {type(message).__name__} before the session was up")
            elif not isinstance(message, Beat):
                assert self._listener is not None
                self._listener.heard(session, message)
        except TransferError as error:
            _LOG.warning("%r is refused: %s", session, error)
            self.counters["refused"] += 1
            self.end(session, PeerGoneError(error.code, f"{session!r}: {error.text}"), tell=True)

    def _greet(self, session: Session, message: Hello | Challenge | Introduce | Welcome) -> None:
        """One step of the handshake. Raises TransferError where it does not go on."""
        step = session.handshake
        if session.state is not State.GREETING:
            raise TransferError("protocol", f"a {type(message).__name__} after the greeting")
        if isinstance(step, Acceptor) and isinstance(message, Hello) and step.peer is None:
            answer: Message = step.on_hello(message)
            session.peer = message.sender
            self.send(session, answer)
        elif isinstance(step, Acceptor) and isinstance(message, Introduce) and step.peer is not None:
            session.carrier = step.on_introduce(message)
            session.about, session.state = message.about, State.LINKING
            if session.carrier == IPC_CARRIER and self.mapper is not None:
                self.mapper.map_peer(session, step.ticket, partial(self._welcome, session))
            else:
                self._welcome(session, "")
        elif isinstance(step, Initiator) and isinstance(message, Challenge) and step.peer is None:
            introduce = step.on_challenge(message)
            session.peer = message.sender
            if self.mapper is not None:
                self.mapper.await_peer(session, step.ticket)
            self.send(session, introduce)
        elif isinstance(step, Initiator) and isinstance(message, Welcome) and step.peer is not None:
            step.on_welcome(message)
            if message.carrier == IPC_CARRIER and not (self.mapper and self.mapper.has_mapped(session, message.about)):
                raise TransferError("protocol", "the acceptor chose carrier 'ipc' without having mapped anything")
            session.about, session.carrier, session.state = message.about, message.carrier, State.LINKING
            session.why = message.why
            self._unmapped(session)
            assert session.address is not None
            host, _ = split_host_port(session.address)
            self._links.connect(session, host, message.link_port, message.ticket)
        else:
            raise TransferError("protocol", f"a {type(message).__name__} out of turn")

    def _welcome(self, session: Session, problem: str) -> None:
        """The carrier is settled, or its `problem` asks for another one."""
        if session.ended:
            return
        assert session.about is not None
        if problem:
            session.why = f"not {session.carrier}: {problem}"[:2000]
            try:
                session.carrier = choose_carrier(session.own, session.about, session.carrier)
            except TransferError as error:
                self.end(session, PeerGoneError(error.code, f"{error.text}; {session.why}"[:2000]), tell=True)
                return
        ticket = os.urandom(NONCE_BYTES)
        self._links.await_ticket(session, ticket)
        welcome = Welcome(
            about=session.own,
            carrier=session.carrier,
            link_port=self._links.port,
            ticket=ticket,
            why=session.why,
        )
        self.send(session, welcome)

    def _unmapped(self, session: Session) -> None:
        if self.mapper is not None and session.carrier != IPC_CARRIER:
            self.mapper.forget(session)

    def _decoded(self, data: bytes) -> AnyMessage | None:
        try:
            return decode_message(data)
        except WireError as error:
            self.counters["malformed"] += 1
            _LOG.warning("%s", error)
            return None


def _silence(session: Session) -> str:
    """What to look for where a session to an address did not come up."""
    if session.address is None or session.state is not State.GREETING:
        return ""
    return ": no engine answers at that address, or none with this one's CURVE key"
