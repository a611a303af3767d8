"""Sessions from connect to the last frame: who is let in, how they end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvferry.errors import RequestError
from kvferry.protocol.auth import Token
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import NO_SEQ, Closed, Error, Stats, StatsReply
from kvferry.protocol.tcp import tune
from kvferry.server.dispatch import Dispatcher, make_handlers
from kvferry.server.failures import failure_of
from kvferry.server.jobs import Jobs
from kvferry.server.lookups import Lookups
from kvferry.server.net.admission import MAX_STRANGERS, Admission
from kvferry.server.net.connection import Connection
from kvferry.server.net.greeter import Greeter
from kvferry.server.net.loop import READ, Loop
from kvferry.server.net.patience import Patience
from kvferry.server.registrar import Registrar
from kvferry.server.session import Greeting, Session
from kvferry.server.session_log import SessionLog
from kvferry.server.state import State
from kvferry.server.work.tasks import Failure

_LOG = logging.getLogger(__name__)

OPERATOR = "token:operator"  # sees what the server's own user sees
_LOOK_S = 1.0


class Sessions:
    """All sessions. Belongs to the loop thread.

    A session ends once, for whatever reason: its leases are released and its jobs cancelled at once, its cache is
    unmapped by the worker, and then, where the client still reads, it gets a last frame and the socket is closed.
    """

    def __init__(
        self,
        loop: Loop[Any],
        state: State,
        *,
        admission: Admission,
        incarnation: bytes,
        tokens: Mapping[str, Token],
        patience: Patience,
    ) -> None:
        self._loop = loop
        self._state = state
        self._admission = admission
        self._patience = patience
        self._sessions: dict[int, Session] = {}
        self._strangers: dict[Session, None] = {}  # over TCP, not welcome yet; the oldest first
        self._ending: dict[Session, None] = {}
        self._look_at = 0.0
        state.more_values.append(lambda: {"sessions": len(self._sessions)})
        self._log = SessionLog()
        self.registrar = Registrar(state, self._on_cache_closed, log=self._log)
        self.jobs = Jobs(state)
        self.lookups = Lookups(state)
        greeter = Greeter(
            tokens,
            incarnation=incarnation,
            heartbeat_s=patience.heartbeat_s,
            on_proven=self._on_proven,
            on_welcome=self._log.connected,
        )
        handlers = make_handlers(self.registrar, self.lookups, self.jobs)
        self._dispatcher = Dispatcher(
            greeter, self.registrar, handlers={**handlers, Stats: self._stats}, refuse=self._refuse
        )

    def __len__(self) -> int:
        return len(self._sessions)

    def accept(self, sock: socket.socket) -> None:
        """Take a new connection; owns the socket."""
        now = time.monotonic()
        if sock.family != socket.AF_UNIX:
            self._accept_stranger(sock, now)
            return
        try:
            admitted = self._admission.admit(sock, self._num_admitted())
        except RequestError as error:
            self._state.refusals.count_session(error.code)
            self._log.refused(None, error.code, str(error))
            _refuse(sock, error)
            return
        tenant, pidfd, own = admitted
        session = Session(next(self._state.ids), tenant, Greeting(remote=False, begun_at=now, own=own), pidfd=pidfd)
        self._begin(session, sock)
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
        self._strangers.pop(session, None)
        session.end_text = text
        session.connection.stop_reading()
        if session.pidfd is not None:
            self._loop.forget(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None
        self._log.ending(session, self.registrar.held_bytes(session))
        self.lookups.drop(session)
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
            self._log.still_mapped(session)
            self._log.ended(session)
        self._sessions.clear()
        self._strangers.clear()
        self._ending.clear()

    def tick(self, now: float) -> None:
        """Close the sockets of those that do not read their last frames; end those that are silent for too long."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            for session in list(self._sessions.values()):
                if not session.ended:
                    self._look_for_silence(session, now)
        for session in list(self._ending):
            if session.close_by is not None and session.close_by <= now:
                session.connection.close()
            self._finish(session)

    def _look_for_silence(self, session: Session, now: float) -> None:
        patience, greeting = self._patience, session.greeting
        if not session.welcome and now - greeting.begun_at > patience.greeting_s:
            self._refuse(session, Failure("silent", f"the greeting was not over within {patience.greeting_s:g} s"))
        elif session.connection.is_overdue(now, patience.frame_s):
            self._on_connection_end(session, f"no whole frame came within {patience.frame_s:g} s", False)
        elif greeting.remote and now - session.connection.heard_at > patience.silence_s:
            self._state.counters.sessions_silent += 1
            self.end(session, f"nothing was heard of the client for {patience.silence_s:g} s")

    def _accept_stranger(self, sock: socket.socket, now: float) -> None:
        """Over TCP: nothing is known of the peer until it shows a token. The oldest stranger makes room."""
        try:
            tune(sock)
        except OSError:  # it has gone already
            sock.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            crowd = f"{MAX_STRANGERS} later connections wait to be greeted, and there is no room for more"
            self._refuse(next(iter(self._strangers)), Failure("crowded", crowd))
        session = Session(next(self._state.ids), "", Greeting(remote=True, begun_at=now))
        self._strangers[session] = None
        self._begin(session, sock)

    def _begin(self, session: Session, sock: socket.socket) -> None:
        self._sessions[session.session_id] = session
        session.connection = Connection(
            sock,
            self._loop,
            on_frame=lambda frame: self._dispatcher.handle(session, frame),
            on_end=lambda text, gone: self._on_connection_end(session, text, gone),
        )

    def _num_admitted(self) -> Counter[str]:
        """How many sessions each tenant has."""
        return Counter(session.tenant for session in self._sessions.values() if session not in self._strangers)

    def _on_proven(self, session: Session, tenant: str) -> None:
        """The peer has shown that it is `tenant`. Raises RequestError where there is no room for it."""
        if session not in self._strangers:
            self._admission.check_share(tenant, self._num_admitted())
            return
        self._admission.check_room(tenant, self._num_admitted())
        del self._strangers[session]

    def _refuse(self, session: Session, failure: Failure) -> None:
        """End a session that is not welcome."""
        self._state.refusals.count_session(failure.code)
        self._log.refused(session, failure.code, failure.text)
        session.send(Error(NO_SEQ, failure.code, failure.text))
        self.end(session, failure.text)

    def _stats(self, session: Session, message: Stats) -> None:
        """All of the server's numbers for who runs it; for others what is theirs."""
        if session.greeting.own or session.tenant == OPERATOR:
            session.send(StatsReply(message.seq, self._state.values()))
        else:
            mine = {"sessions": self._num_admitted()[session.tenant]}
            session.send(StatsReply(message.seq, {**self._state.values_of(session.tenant), **mine}))

    def _on_connection_end(self, session: Session, text: str, gone: bool) -> None:
        if not gone:
            self._state.counters.sessions_broken += 1
            if not session.welcome:
                self._log.refused(session, "protocol", text)
            session.send(Error(NO_SEQ, "protocol", text))
        self.end(session, text)

    def _on_cache_closed(self, session: Session) -> None:
        if session.ended:
            self._finish(session)

    def _finish(self, session: Session) -> None:
        """Go as far with ending a session as it has come: last frame, close, forget."""
        if session.caches:
            return
        self._log.ended(session)
        connection = session.connection
        if not connection.closed and session.close_by is None:
            session.close_by = time.monotonic() + self._patience.linger_s
            connection.send(Closed(session.end_text))
            connection.finish()
        if connection.closed:
            self._sessions.pop(session.session_id, None)
            self._ending.pop(session, None)


def _refuse(sock: socket.socket, error: RequestError) -> None:
    """Tell a peer why it may not connect, if it fits into its socket at once, and close."""
    failure = failure_of(error)
    sock.setblocking(False)
    try:
        sock.send(encode_frame(Error(NO_SEQ, failure.code, failure.text)))
    except OSError:
        _LOG.debug("a refused peer had gone before it could be told why: %s", error)
    finally:
        sock.close()
