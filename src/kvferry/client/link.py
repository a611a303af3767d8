"""The connection to a cache server: calls go out from any thread, answers find who waits for them."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvferry.client.conversation import Conversation
from kvferry.client.handshake import Greeting, connect, greet
from kvferry.client.idle import Idle
from kvferry.client.incoming import Heard, Incoming
from kvferry.client.process import ServerProcess
from kvferry.client.url import Address
from kvferry.client.waiting import Answer, OnAnswer, OnLost, OnProgress, Waiting
from kvferry.errors import DeadlineError, ServerGoneError
from kvferry.ipc.forks import tell_after_fork
from kvferry.protocol.auth import Token
from kvferry.protocol.framing import encode_request, send_within
from kvferry.protocol.messages import Message, Ping

_IDLE_S = 1.0
_BEATS = 3  # a server that was not heard for so many heartbeats is gone

_R = TypeVar("_R", bound=Message)


class Link:
    """A socket to the server at `address`, greeted. Thread-safe. Of no use in a forked child, which closes its copy.

    A thread of its own (`kvferry-client`) reads what comes, and keeps up heartbeats; a caller that waits for a reply
    reads by itself where nobody else is at it, which saves the way from thread to thread. That thread also calls
    `on_end(link)`, once, when nothing more can be said.

    Raises ServerGoneError where no server answers, RequestError where it refuses, ProtocolError for another version.
    """

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        *,
        token: Token | None = None,
        on_end: Callable[[Link], None] = lambda link: None,
    ) -> None:
        self._address = address
        self._on_end = on_end
        self._ended = ""  # why nothing more can be said
        self._forked = self._dropped = False
        self._sent_at = time.monotonic()
        self._waiting = Waiting()
        self._send_lock = threading.Lock()
        self._fd_lock = threading.Lock()  # guards the closing of the descriptors; held for a moment only
        self._idle = Idle()  # the reader's thread sleeps on it
        try:
            self._socket = connect(address, timeout_s)
        except BaseException:
            self._idle.close()
            raise
        self._idle.epoll.register(self._socket, select.EPOLLIN)
        self._server = ServerProcess(self._socket)  # before it answers, so that it is the one that does
        self._incoming = Incoming(self._socket, deliver=self._waiting.deliver, hang_up=self._hang_up)
        tell_after_fork(self)
        self._reader = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        try:
            self.greeting: Greeting = greet(self._socket, timeout_s, token=token)
            self._reader.start()
        except BaseException:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # for a forked child may have a copy
            self._close_fds()
            raise

    @property
    def usable(self) -> bool:
        """Whether calls can still be made."""
        return not self._forked and not self._ended

    @property
    def congested(self) -> bool:
        """Whether a frame might have to wait before it is sent: the server does not read what it was sent before."""
        poller = select.poll()
        with self._fd_lock:
            if not self.usable or self._socket.fileno() < 0:
                return False
            poller.register(self._socket, select.POLLOUT)
            return not poller.poll(0)

    def gone(self) -> ServerGoneError:
        """What calls raise that can no longer be made."""
        return ServerGoneError(self._ended)

    @contextlib.contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """A new seq, and the replies to it while the body runs."""
        self._check()
        talk = Conversation(self._waiting.next_seq(), self.read_for)
        self._waiting.add_talk(talk.seq, talk.answers.put)
        try:
            yield talk
        finally:
            self._waiting.drop(talk.seq)

    def call(self, make: Callable[[int], Message], kind: type[_R], timeout_s: float) -> _R:
        """Send `make(seq)` and wait for its one reply; raises what `Conversation.receive` raises."""
        with self.conversation() as talk:
            self.send(make(talk.seq), timeout_s)
            return talk.receive(kind, timeout_s)

    def expect(
        self, on_answer: OnAnswer, on_lost: OnLost = lambda: None, on_progress: OnProgress = lambda stages: None
    ) -> int:
        """A new seq, that of a job, whose last answer goes to `on_answer` in whatever thread reads it.

        The server reads or writes our memory for it. So where the connection ends, whoever ended it, the failure is
        told only once that is over: the server has said so, or its process is gone (its socket can close before its
        copies stop). That it has ended is told by `on_lost`, at once.
        """
        self._check()
        seq = self._waiting.next_seq()
        self._waiting.add_job(seq, on_answer, on_lost, on_progress)
        return seq

    def forget(self, seq: int) -> None:
        """Nobody waits for the answer to `seq` any more."""
        self._waiting.drop(seq)

    def send(self, message: Message, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Send one frame; the descriptors stay the caller's.

        Raises DeadlineError, ServerGoneError, and ValueError for what no server takes; nothing was sent then.
        """
        self._check()
        data = encode_request(message)
        deadline = time.monotonic() + timeout_s
        if not self._send_lock.acquire(timeout=timeout_s):
            raise DeadlineError(f"other calls kept the connection busy for {timeout_s:g} s")
        try:
            send_within(self._socket, data, deadline, fds)
            self._sent_at = time.monotonic()
        except DeadlineError:
            self._hang_up("a frame could not be sent in time")
            raise
        except OSError as error:
            text = self._ended or f"the server at {self._address} went away: {error}"
            raise ServerGoneError(text) from error
        finally:
            self._send_lock.release()

    def read_for(self, answers: queue.SimpleQueue[Answer], deadline: float) -> None:
        """Read the socket in the caller's thread until `answers` has something; returns at once where another reads."""
        if not self._incoming.turn.acquire(blocking=False):
            return
        try:
            if not self._ended:  # else the descriptors may be closed
                self._read_until(answers, deadline)
        finally:
            self._incoming.turn.release()

    def _read_until(self, answers: queue.SimpleQueue[Answer], deadline: float) -> None:
        """Needs the turn. The reader's thread sleeps on meanwhile: if both woke, they would wait for each other."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._idle.wake_fd, select.POLLIN)
        self._idle.epoll.modify(self._socket, 0)
        try:
            while answers.empty() and not self._ended and (left := deadline - time.monotonic()) > 0:
                poller.poll(left * 1e3)
                self._incoming.read()
        finally:
            self._idle.epoll.modify(self._socket, select.EPOLLIN)

    @property
    def ended(self) -> bool:
        """Whether all of it is over: nobody waits any more, and the server cannot copy for us."""
        return not self._reader.is_alive()

    def close(self, timeout_s: float = 10.0, why: str = "the client was closed") -> bool:
        """Hang up, fail what is waiting, end the reader. Idempotent.

        False where the server has not said within `timeout_s` that it is done with our memory; the jobs that are left
        fail when it has, or when its process is gone.
        """
        if self._forked:
            return True
        self._hang_up(why)
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)
        return self.ended

    def drop(self) -> None:
        """Have the reader hang up, within a second. For finalisers: takes no lock."""
        self._dropped = True

    def after_fork(self) -> None:
        """In a forked child: the connection belongs to the parent."""
        self._forked = True
        self._close_fds()

    def _close_fds(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        self._incoming.close()
        self._idle.close()
        self._server.close()

    def _check(self) -> None:
        if self._forked:
            raise ServerGoneError("this client belongs to the parent process; make a new one in the forked child")
        if self._ended:
            raise self.gone()

    def _hang_up(self, why: str) -> None:
        """Say nothing more; the server may still have something to say."""
        self._ended = self._ended or f"no connection to the server at {self._address}: {why}"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with self._fd_lock:
            if self._socket.fileno() >= 0:
                self._idle.wake()

    def _run(self) -> None:
        """The reader's thread: whatever happens in it, the link ends and everybody who waits is told."""
        try:
            self._read_until_gone()
        except Exception as error:  # noqa: BLE001 - whatever it is, the jobs must end
            self._hang_up(f"reading failed: {error!r}")
        finally:
            self._hang_up("the reader was stopped")
            try:
                left = self._waiting.fail(self.gone, jobs_too=False)
                self._on_end(self)
                if left:
                    self._wait_for_copies_to_stop()
            finally:
                self._waiting.fail(self.gone, jobs_too=True)
                with self._incoming.turn, self._send_lock, self._fd_lock:
                    self._close_fds()

    def _read_until_gone(self) -> None:
        self._idle.epoll.register(self._idle.wake_fd, select.EPOLLIN)
        self._server.watch(self._idle.epoll)
        heartbeat_s = self.greeting.heartbeat_s
        idle_s = min(_IDLE_S, heartbeat_s / 4) if heartbeat_s > 0 else _IDLE_S
        while not self._ended:
            if self._dropped:
                self._hang_up("the client was dropped")
                return
            ready = self._idle.epoll.poll(idle_s)
            if ready and all(fd not in (self._socket.fileno(), self._idle.wake_fd) for fd, _ in ready):
                self._hang_up("the server's process ended")  # and another that it forked holds the socket
                return
            if self._incoming.turn.acquire(timeout=idle_s):  # else a caller reads
                try:
                    self._incoming.read()
                finally:
                    self._incoming.turn.release()
            if heartbeat_s > 0:
                self._beat(heartbeat_s, time.monotonic())

    def _beat(self, heartbeat_s: float, now: float) -> None:
        """Say something where nothing was said for long; end the link where nothing was heard for longer."""
        if now - self._incoming.heard_at > _BEATS * heartbeat_s:
            self._hang_up(f"nothing was heard of the server for {_BEATS * heartbeat_s:g} s")
        elif now - self._sent_at > heartbeat_s / 2 and self._send_lock.acquire(blocking=False):  # else somebody sends
            try:
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                if poller.poll(0):
                    send_within(self._socket, encode_request(Ping(self._waiting.next_seq())), now + 1)
                    self._sent_at = now
            finally:
                self._send_lock.release()

    def _wait_for_copies_to_stop(self) -> None:
        """Return once the server neither reads nor writes our memory any more, or its process is gone.

        A server that lives hangs up when its copies for us have stopped, and mostly says goodbye before. One that hung
        up without may be dying.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        self._server.watch(poller)
        while self._incoming.heard is Heard.SOME:
            poller.poll(_IDLE_S * 1e3)
            if self._server.is_gone():
                return
            with self._incoming.turn:
                self._incoming.read()
        if self._incoming.heard is Heard.ALL:
            self._server.wait_until_it_cannot_copy()
