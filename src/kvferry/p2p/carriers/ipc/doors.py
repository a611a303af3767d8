"""The Unix sockets between engines: where they meet, and by which each learns that the other is done, or dead."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.errors import KVFerryError, ShareError
from kvferry.ipc.forks import tell_after_fork
from kvferry.ipc.peer import open_pidfd
from kvferry.p2p.carriers.ipc.caches import Exported, PeerCaches
from kvferry.p2p.carriers.ipc.door import Door, DoorEvents
from kvferry.p2p.carriers.ipc.meeting import STEP_S, Meeting, check_user, receive_exactly
from kvferry.p2p.signal.handshake import TICKET_BYTES
from kvferry.p2p.signal.session import Session

_LOG = logging.getLogger(__name__)
_READ = selectors.EVENT_READ
_WAIT_S = 1.0
_END_S = 10.0
_MAX_MEETINGS = 64
_DONE = b"D"

Call = Callable[[], None]
Settled = Callable[[str], None]


class Doors:
    """Runs `kvferry-p2p-ipc`, which listens and watches the peers, and a thread for each meeting, which ends soon.

    The name of the listening socket is not in any file system, so that nothing of it outlives the process.
    """

    def __init__(self, events: DoorEvents) -> None:
        self._events = events
        self.own = Exported()
        self.path = f"kvferry-p2p-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.path}")
        self._listener.listen(_MAX_MEETINGS)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the fields below; nothing waits while it is held
        self._tickets: dict[bytes, Session] = {}
        self._doors: dict[Session, Door] = {}
        self._meetings: dict[threading.Thread, socket.socket] = {}
        self._inbox: deque[Call] = deque()
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-ipc", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._selector.register(self._wake_fd, _READ, lambda: os.eventfd_read(self._wake_fd))
        self._selector.register(self._listener, _READ, self._on_accept)
        tell_after_fork(self)
        self._thread.start()

    def after_fork(self) -> None:
        """A forked child must not keep the sockets open: where there is no pidfd, their end tells of this process's."""
        self._lock = threading.Lock()
        self._closing = True
        for door in self._doors.values():
            door.close()
        for sock in (self._listener, *self._meetings.values()):
            sock.close()

    def await_visitor(self, session: Session, ticket: bytes) -> None:
        """The other engine may come and show it, until `forget`."""
        with self._lock:
            self._tickets[ticket] = session

    def visit(self, session: Session, ticket: bytes, then: Settled) -> None:
        """Meet the engine at the other end of a session, whose `about` is known.

        `then` is called in another thread, with what kept the two from sharing; "" where they do.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if not self._begin_meeting(sock, partial(self._visit, session, sock, ticket, then)):
            then("too many engines meet at once")

    def caches_of(self, session: Session) -> PeerCaches | None:
        """What is mapped of the peer's; None where the two have not met."""
        with self._lock:
            door = self._doors.get(session)
        return None if door is None else door.caches

    def reads(self, session: Session) -> bool:
        """Whether the peer may still read this engine's KV."""
        with self._lock:
            door = self._doors.get(session)
        return door is not None and door.reads

    def say_done(self, session: Session) -> None:
        """This engine reads the peer's KV no more: unmap it, and tell the peer."""
        with self._lock:
            door = self._doors.get(session)
        if door is not None:
            door.caches.close()
            with contextlib.suppress(OSError):
                door.sock.send(_DONE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def forget(self, session: Session) -> None:
        """Nobody reads anything over the session any more: hang up. Idempotent."""
        with self._lock:
            door = self._doors.pop(session, None)
            for ticket in [ticket for ticket, owner in self._tickets.items() if owner == session]:
                del self._tickets[ticket]
        if door is not None:
            door.caches.close()
            self._call(partial(self._close_door, door))

    def close(self) -> None:
        """Hang up on all, end all threads. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            meetings, doors = dict(self._meetings), list(self._doors.values())
            self._doors.clear()
        os.eventfd_write(self._wake_fd, 1)
        for sock in meetings.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *meetings):
            if thread.is_alive():
                thread.join(_END_S)
        for door in doors:
            door.caches.close()
            door.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_WAIT_S):
                if key.fd in self._selector.get_map():  # an earlier call of this round may have closed it
                    _guarded(key.data)
            while self._inbox:
                _guarded(self._inbox.popleft())
        while self._inbox:
            _guarded(self._inbox.popleft())

    def _call(self, call: Call) -> None:
        """Have the thread call it; nothing where it ends, for it closes all then."""
        with self._lock:
            if not self._closing:
                self._inbox.append(call)
                os.eventfd_write(self._wake_fd, 1)

    def _on_accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _LOG.warning("an engine could not be let in: %s", error)
            return
        self._begin_meeting(sock, partial(self._receive, sock))

    def _begin_meeting(self, sock: socket.socket, meet: Call) -> bool:
        """Run `meet` in a thread of its own; too many at once are turned away."""
        thread = threading.Thread(target=meet, name="kvferry-p2p-ipc-meeting", daemon=True)
        with self._lock:
            welcome = not self._closing and len(self._meetings) < _MAX_MEETINGS
            if welcome:
                self._meetings[thread] = sock
        if welcome:
            thread.start()
        else:
            sock.close()
        return welcome

    def _visit(self, session: Session, sock: socket.socket, ticket: bytes, then: Settled) -> None:
        about = session.about
        assert about is not None
        problem = ""
        try:
            sock.settimeout(STEP_S)
            sock.connect(f"\0{about.ipc_path}")
            check_user(sock)
            sock.sendall(ticket)
            caches = Meeting(sock, self.own).as_visitor(session.own, about)
            self._open_door(session, sock, caches)
        except (KVFerryError, OSError) as error:
            problem = str(error) or repr(error)
            sock.close()
        except Exception as error:  # noqa: BLE001 - the session goes on with another carrier
            _LOG.exception("a meeting with another engine failed")
            problem = repr(error)
            sock.close()
        finally:
            with self._lock:
                del self._meetings[threading.current_thread()]
        then(problem)

    def _receive(self, sock: socket.socket) -> None:
        try:
            check_user(sock)
            ticket = receive_exactly(sock, TICKET_BYTES)
            with self._lock:
                session = self._tickets.pop(ticket, None)
            if session is None:
                raise ShareError("an engine came that no session announced")
            Meeting(sock, self.own).as_host(partial(self._open_door, session, sock))
        except (KVFerryError, OSError) as error:
            _LOG.info("a meeting with another engine came to nothing: %s", error)
            self._shut(sock)
        except Exception:  # noqa: BLE001 - the other engine takes another carrier
            _LOG.exception("a meeting with another engine failed")
            self._shut(sock)
        finally:
            with self._lock:
                del self._meetings[threading.current_thread()]

    def _shut(self, sock: socket.socket) -> None:
        """Close it, unless it has become a door's: its end is noticed there."""
        with self._lock:
            owned = any(door.sock is sock for door in self._doors.values())
        if not owned:
            sock.close()

    def _open_door(self, session: Session, sock: socket.socket, caches: PeerCaches) -> None:
        door = Door(session, sock, None, caches)
        try:
            door.pidfd = open_pidfd(sock)
            with self._lock:
                if self._closing or session.ended:
                    raise ShareError("the session has ended")
                self._doors[session] = door
        except BaseException:
            caches.close()
            if door.pidfd is not None:
                os.close(door.pidfd)
            raise
        self._call(partial(self._watch, door))

    def _watch(self, door: Door) -> None:
        if door.sock.fileno() < 0:
            return  # forgotten already
        door.sock.setblocking(False)
        self._selector.register(door.sock, _READ, partial(self._on_word, door))
        if door.pidfd is not None:
            self._selector.register(door.pidfd, _READ, partial(self._on_death, door))

    def _on_word(self, door: Door) -> None:
        try:
            data = door.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == _DONE:
            self._reads_no_more(door)
            return
        # A killed process hangs up before its copies have ended: only its pidfd tells of that.
        self._selector.unregister(door.sock)
        if door.pidfd is None:
            self._reads_no_more(door)
        self._events.peer_left(door.session)

    def _on_death(self, door: Door) -> None:
        assert door.pidfd is not None
        self._selector.unregister(door.pidfd)
        self._reads_no_more(door)
        self._events.peer_left(door.session)

    def _reads_no_more(self, door: Door) -> None:
        if door.reads:
            door.reads = False
            self._events.peer_reads_no_more(door.session)

    def _close_door(self, door: Door) -> None:
        for watched in (door.sock, door.pidfd):
            if watched is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(watched)
        door.close()


def _guarded(call: Call) -> None:
    """A mistake in one call must not end the thread that all peers' deaths are learnt from."""
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it is
        _LOG.exception("a call of the doors' thread failed")
