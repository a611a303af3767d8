"""Sessions from connect to the last frame: who may connect, what is dispatched, how they end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import KVFerryError, ProtocolError, RequestError
from kvferry.protocol.framing import Frame, encode_frame
from kvferry.protocol.messages import (
    NO_SEQ,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Closed,
    Confirm,
    Error,
    FdBatch,
    Hello,
    Lookup,
    Ping,
    Pong,
    Register,
    Release,
    Request,
    Retrieve,
    Stats,
    StatsReply,
    Store,
    Unregister,
    Welcome,
)
from kvferry.server.connection import FRAME_S, Connection
from kvferry.server.failures import failure_of
from kvferry.server.jobs import Jobs
from kvferry.server.lookups import Lookups
from kvferry.server.loop import READ, Loop
from kvferry.server.peer import check_uid, credentials, open_pidfd
from kvferry.server.registrar import Registrar
from kvferry.server.session import Session
from kvferry.server.state import State

_LOG = logging.getLogger(__name__)

_LOOK_S = 1.0
_LINGER_S = 2.0  # how long an ended session may take to read its last frames

Handler = Callable[[Session, Any], None]


class Admission:
    """Who may connect, and how many at a time."""

    def __init__(self, *, own_uid: int, allow_uids: frozenset[int], max_sessions: int) -> None:
        self._own_uid = own_uid
        self._allow_uids = allow_uids
        self._max_sessions = max_sessions

    def admit(self, sock: socket.socket, num_sessions: int) -> tuple[str, int | None]:
        """The tenant and the pidfd of a new peer. Raises RequestError where it may not connect."""
        peer = credentials(sock)
        check_uid(peer.uid, self._own_uid, self._allow_uids)
        if num_sessions >= self._max_sessions:
            raise RequestError("busy", f"{num_sessions} sessions are connected, which is all that max_sessions allows")
        try:
            return f"uid:{peer.uid}", open_pidfd(sock)
        except ProcessLookupError:
            raise RequestError("gone", f"process {peer.pid} ended before it was accepted") from None


class Sessions:
    """All sessions. Belongs to the loop thread.

    A session ends once, for whatever reason: its leases are released and its jobs cancelled at once, its cache is
    unmapped by the worker, and then, where the client still reads, it gets a last frame and the socket is closed.
    """

    def __init__(self, loop: Loop[Any], state: State, *, admission: Admission, incarnation: bytes) -> None:
        self._loop = loop
        self._state = state
        self._admission = admission
        self._incarnation = incarnation
        self._sessions: dict[int, Session] = {}
        self._ending: dict[Session, None] = {}
        self._look_at = 0.0
        self.registrar = Registrar(state, self._on_cache_closed)
        self.jobs = Jobs(state)
        self._lookups = Lookups(state)
        self._handlers: Mapping[type[Request], Handler] = {
            Lookup: self._lookups.lookup,
            Release: self._lookups.release,
            Attach: self._lookups.attach,
            Store: self.jobs.store,
            Retrieve: self.jobs.retrieve,
            Cancel: self.jobs.cancel,
            Register: self.registrar.register,
            Confirm: self.registrar.confirm,
            Unregister: self.registrar.unregister,
            Stats: self._stats,
            Ping: lambda session, message: session.send(Pong(message.seq)),
        }

    def __len__(self) -> int:
        return len(self._sessions)

    def accept(self, sock: socket.socket) -> None:
        """Take a new connection; owns the socket."""
        try:
            tenant, pidfd = self._admission.admit(sock, len(self._sessions))
        except RequestError as error:
            self._state.counters.sessions_refused += 1
            _refuse(sock, error)
            return
        session = Session(next(self._state.ids), tenant, pidfd=pidfd)
        self._sessions[session.session_id] = session
        session.connection = Connection(
            sock,
            self._loop,
            on_frame=lambda frame: self._on_frame(session, frame),
            on_end=lambda text, gone: self._on_connection_end(session, text, gone),
        )
        if pidfd is not None:
            self._loop.watch(pidfd, READ, lambda _: self.end(session, "the client's process ended", gone=True))

    def end(self, session: Session, text: str, *, gone: bool = False) -> None:
        """End a session and give back all that it holds. Idempotent.

        With `gone` the client's process has ended, and the socket is closed at once. A client that lives sees it closed
        only when nothing of its memory is in use any more, and may go by that.
        """
        if gone:
            session.connection.close()
        if session.ended:
            self._finish(session)
            return
        session.ended = True
        self._ending[session] = None
        session.end_text = text
        session.connection.stop_reading()
        if session.pidfd is not None:
            self._loop.forget(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None
        self._state.leases.release_owner(session.session_id)
        self.registrar.close(session)
        self._finish(session)

    def end_all(self, text: str) -> None:
        """End every session, each as soon as its copies have stopped."""
        for session in list(self._sessions.values()):
            self.end(session, text)

    def close(self) -> None:
        """Hang up on those that are left, once no loop and no worker runs any more."""
        for session in self._sessions.values():
            session.connection.close()
            if session.pidfd is not None:
                os.close(session.pidfd)
        self._sessions.clear()
        self._ending.clear()

    def tick(self, now: float) -> None:
        """Close the sockets of those that do not read their last frames; end those that leave a frame unfinished."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            for session in [session for session in self._sessions.values() if session.connection.is_overdue(now)]:
                self._on_connection_end(session, f"no whole frame came within {FRAME_S:g} s", False)
        for session in list(self._ending):
            if session.close_by is not None and session.close_by <= now:
                session.connection.close()
            self._finish(session)

    def _on_frame(self, session: Session, frame: Frame[Request]) -> None:
        message = frame.message
        try:
            if isinstance(message, Hello):
                self._hello(session, message)
            elif isinstance(message, FdBatch):
                self.registrar.take_fds(session, frame)
            elif not session.greeted:
                raise ProtocolError(f"the first frame is {type(message).__name__}; it must be Hello")
            else:
                self._handlers[type(message)](session, message)
        except ProtocolError:
            raise
        except (KVFerryError, ValueError) as error:
            failure = failure_of(error)
            session.send(Error(getattr(message, "seq", NO_SEQ), failure.code, failure.text))
        except Exception as error:
            _LOG.exception("session %d: %s failed", session.session_id, type(message).__name__)
            raise ProtocolError(f"the server failed in {type(message).__name__}: {type(error).__name__}") from error

    def _hello(self, session: Session, message: Hello) -> None:
        if session.greeted:
            raise ProtocolError("a second Hello")
        if message.oldest > PROTOCOL_VERSION or message.version < OLDEST_VERSION:
            raise ProtocolError(
                f"the client speaks protocol {message.oldest} to {message.version}, "
                f"this server {OLDEST_VERSION} to {PROTOCOL_VERSION}; update the older one"
            )
        session.greeted = True
        session.send(Welcome(min(message.version, PROTOCOL_VERSION), self._incarnation))

    def _stats(self, session: Session, message: Stats) -> None:
        session.send(StatsReply(message.seq, {**self._state.values(), "sessions": len(self._sessions)}))

    def _on_connection_end(self, session: Session, text: str, gone: bool) -> None:
        if not gone:
            self._state.counters.sessions_broken += 1
            session.send(Error(NO_SEQ, "protocol", text))
        self.end(session, text)

    def _on_cache_closed(self, session: Session) -> None:
        if session.ended:
            self._finish(session)

    def _finish(self, session: Session) -> None:
        """Go as far with ending a session as it has come: last frame, close, forget."""
        if session.caches:
            return
        connection = session.connection
        if not connection.closed and session.close_by is None:
            session.close_by = time.monotonic() + _LINGER_S
            connection.send(Closed(session.end_text))
            connection.finish()
        if connection.closed:
            self._sessions.pop(session.session_id, None)
            self._ending.pop(session, None)


def _refuse(sock: socket.socket, error: RequestError) -> None:
    """Tell a peer why it may not connect, if it fits into its socket at once, and close."""
    sock.setblocking(False)
    try:
        sock.send(encode_frame(Error(NO_SEQ, error.code, str(error))))
    except OSError:
        _LOG.info("a refused peer had gone before it could be told why: %s", error)
    finally:
        sock.close()
