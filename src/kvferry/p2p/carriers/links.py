"""The links of an engine: a TCP connection for each session, and the thread that serves them."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvferry.errors import ProtocolError, ShareError
from kvferry.ipc.forks import tell_after_fork
from kvferry.p2p.carriers.link import Link
from kvferry.p2p.signal.messages import NONCE_BYTES

_LOG = logging.getLogger(__name__)
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_CONFIRMED = b"\1"
_MAX_STRANGERS = 64
_STRANGER_S = 5.0
_WAIT_S = 1.0
_END_S = 10.0

S = TypeVar("S")
C = TypeVar("C", contravariant=True)
Call = Callable[[], None]


class LinkEvents(Protocol[C]):
    """Called in the links' thread, which must not be held up."""

    def link_up(self, session: C) -> None:
        """The peer is connected."""

    def link_lost(self, session: C, reason: str) -> None:
        """The connection has ended; nothing is read or written for the session any more."""

    def item_landed(self, session: C, number: int, *items: int) -> None:
        """All bytes of one item are in their place."""


@dataclass(slots=True, eq=False)
class _Coming:
    """A connection that is not a link yet: a stranger, who has to show a ticket, or our own, not confirmed."""

    socket: socket.socket
    until: float
    ticket: bytes = b""  # ours to show, and then what came of the stranger's
    heard: bytes = b""


class Links(Generic[S]):
    """Runs `kvferry-p2p-links`, in which all but the constructor, `start` and `close` happens: methods only queue."""

    def __init__(self, host: str, events: LinkEvents[S]) -> None:
        """Listens at `host` (a number), at any free port. Raises ShareError where it cannot."""
        self._events = events
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(_MAX_STRANGERS)
        except OSError as error:
            self._listener.close()
            raise ShareError(f"cannot listen at {host}: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._links: dict[S, Link] = {}
        self._strangers: list[_Coming] = []
        self._coming: dict[S, _Coming] = {}
        self._tickets: dict[bytes, S] = {}
        self._inbox: deque[Call] = deque()
        self._lock = threading.Lock()  # the wake-up's number is nobody else's while it is written to
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-links", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_fd, READ, lambda _: os.eventfd_read(self._wake_fd))
        self._selector.register(self._listener, READ, self._on_accept)
        tell_after_fork(self)
        self._thread.start()

    def after_fork(self) -> None:
        """A forked child must not keep the connections open: their end tells peers that this process has died."""
        self._lock = threading.Lock()
        self._closing = True
        self._close_sockets()

    def close(self) -> None:
        """End the thread and all links, after what was queued. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._close_sockets()
        self._selector.close()
        os.close(self._wake_fd)

    def call(self, call: Call) -> None:
        """Have the thread call it, after what was queued before; not once it ends."""
        with self._lock:
            if not self._closing:
                self._inbox.append(call)
                os.eventfd_write(self._wake_fd, 1)

    def await_ticket(self, session: S, ticket: bytes) -> None:
        """A peer will come and show it."""
        self.call(partial(self._tickets.__setitem__, ticket, session))

    def connect(self, session: S, host: str, port: int, ticket: bytes) -> None:
        """Go to a peer, whose `host` is a number, and show the ticket."""
        self.call(partial(self._connect, session, (host, port), ticket))

    def confirm(self, session: S) -> None:
        """Tell a peer that came that it is welcome."""
        self.call(partial(self._confirm, session))

    def drop(self, session: S) -> None:
        """End what there is of a session's link; `link_lost` is not called for it."""
        self.call(partial(self._drop, session))

    def use(self, session: S, use: Callable[[Link], None]) -> None:
        """Have the thread do something with a link; nothing happens where there is none."""
        self.call(partial(self._with_link, session, use))

    def stop_sending(self, session: S, number: int, then: Call) -> None:
        """Read nothing of a transfer's source any more, and then call `then`, in any case."""
        self.use(session, lambda link: link.stop_sending(number))
        self.call(then)

    def stop_landing(self, session: S, number: int, then: Call) -> None:
        """Write nothing of a transfer any more, and then call `then`, in any case."""
        self.use(session, lambda link: link.stop_landing(number))
        self.call(then)

    def _close_sockets(self) -> None:
        for coming in [*self._strangers, *self._coming.values()]:
            coming.socket.close()
        for link in list(self._links.values()):
            link.socket.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(_WAIT_S):
                if key.fd in self._selector.get_map():  # an earlier call of this round may have dropped it
                    key.data(events)
            self._do_queued()
            self._drop_late()
        self._do_queued()

    def _do_queued(self) -> None:
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001 - a mistake in one call must not end the thread that all links depend on
                _LOG.exception("a call of the links' thread failed")

    def _with_link(self, session: S, use: Callable[[Link], None]) -> None:
        link = self._links.get(session)
        if link is not None:
            use(link)
            self._watch(session, link)

    def _watch(self, session: S, link: Link) -> None:
        """Wait for what can happen next."""
        events = READ | (WRITE if link.wants_to_send else 0)
        if self._selector.get_key(link.socket).events != events:
            self._selector.modify(link.socket, events, partial(self._on_link, session, link))

    def _on_link(self, session: S, link: Link, events: int) -> None:
        try:
            if events & READ and not link.read():
                raise ConnectionError("the peer hung up")
            if events & WRITE:
                link.flush()
            self._watch(session, link)
        except (OSError, ProtocolError) as error:
            self._drop(session)
            self._events.link_lost(session, str(error))
        except Exception as error:  # noqa: BLE001 - a mistake of ours ends this link and no other
            _LOG.exception("a link failed")
            self._drop(session)
            self._events.link_lost(session, repr(error))

    def _drop(self, session: S) -> None:
        link, coming = self._links.pop(session, None), self._coming.pop(session, None)
        for sock in [found.socket for found in (link, coming) if found is not None]:
            self._close(sock)
        for ticket in [ticket for ticket, owner in self._tickets.items() if owner == session]:
            del self._tickets[ticket]

    def _close(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _on_accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it went away again, or there is no descriptor left
            _LOG.warning("a connection could not be taken: %s", error)
            return
        sock.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._close(self._strangers.pop(0).socket)
        stranger = _Coming(sock, time.monotonic() + _STRANGER_S)
        self._strangers.append(stranger)
        self._selector.register(sock, READ, partial(self._on_stranger, stranger))

    def _on_stranger(self, stranger: _Coming, _events: int) -> None:
        try:
            data = stranger.socket.recv(NONCE_BYTES - len(stranger.heard))
        except OSError:
            data = b""
        stranger.heard += data
        if data and len(stranger.heard) < NONCE_BYTES:
            return
        self._strangers.remove(stranger)
        session = self._tickets.pop(stranger.heard, None)
        if session is None:
            self._close(stranger.socket)
            return
        self._begin(session, stranger.socket)
        self._events.link_up(session)

    def _connect(self, session: S, place: tuple[str, int], ticket: bytes) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        coming = self._coming[session] = _Coming(sock, float("inf"), ticket)
        sock.connect_ex(place)
        self._selector.register(sock, WRITE, partial(self._on_coming, session, coming))

    def _on_coming(self, session: S, coming: _Coming, events: int) -> None:
        """Our own connection has come about, or the peer has confirmed it."""
        try:
            if events & WRITE:
                problem = coming.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                coming.socket.send(coming.ticket)  # the first bytes of a connection always fit
                self._selector.modify(coming.socket, READ, partial(self._on_coming, session, coming))
            elif coming.socket.recv(1) != _CONFIRMED:
                raise ConnectionError("the peer did not take the link")
            else:
                del self._coming[session]
                self._begin(session, coming.socket)
                self._events.link_up(session)
        except OSError as error:
            self._drop(session)
            self._events.link_lost(session, f"the link did not come about: {error}")

    def _begin(self, session: S, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._links[session] = Link(sock, partial(self._events.item_landed, session), self._do_queued)
        self._close_watch(sock)
        self._selector.register(sock, READ, partial(self._on_link, session, link))

    def _close_watch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def _confirm(self, session: S) -> None:
        link = self._links.get(session)
        if link is not None:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                link.socket.send(_CONFIRMED)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if stranger.until < now]:
            self._strangers.remove(stranger)
            self._close(stranger.socket)
        for session in [session for session, link in self._links.items() if link.is_late(now)]:
            self._drop(session)
            self._events.link_lost(session, "what was agreed on did not come, or was not taken, in time")
