"""The connection to a cache server: calls go out from any thread, answers find who waits for them."""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvferry.client.forks import tell_after_fork
from kvferry.client.handshake import connect, greet
from kvferry.client.process import ServerProcess
from kvferry.client.url import Address
from kvferry.client.waiting import Answer, OnAnswer, Waiting
from kvferry.errors import DeadlineError, KVFerryError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.framing import encode_request, receive, reply_reader, send_within
from kvferry.protocol.messages import Closed, Error, Message

_IDLE_MS = 1000

_R = TypeVar("_R", bound=Message)


class Conversation:
    """The replies to one seq, in order. Made by `Link.conversation`."""

    def __init__(self, link: Link, seq: int) -> None:
        self._link = link
        self.seq = seq
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def receive(self, kind: type[_R], timeout_s: float) -> _R:
        """The next reply.

        Raises RequestError where the server refused, ServerGoneError where it went away, DeadlineError, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        self._link.read_for(self.answers, deadline)
        try:
            answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DeadlineError(f"the server did not answer within {timeout_s:g} s") from None
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Error):
            raise RequestError(answer.code, answer.text)
        if isinstance(answer, KVFerryError):
            raise answer
        raise ProtocolError(f"the server answered {type(answer).__name__}, expected {kind.__name__}")


class _Heard(enum.Enum):
    """What the server has said: SOME and it may say more, ALL that will ever come, or GOODBYE."""

    SOME = "some"
    ALL = "all"
    GOODBYE = "goodbye"


class Link:
    """A socket to the server at `address`, greeted. Thread-safe. Of no use in a forked child, which closes its copy.

    A thread of its own reads what comes; a caller that waits for a reply reads by itself where nobody else is at it,
    which saves the way from thread to thread.

    Raises ServerGoneError where no server answers, RequestError where it refuses, ProtocolError for another version.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._socket = connect(address, timeout_s)
        self._server = ServerProcess(self._socket)  # before it answers, so that it is the one that does
        try:
            self.incarnation = greet(self._socket, timeout_s).incarnation
        except BaseException:
            self._socket.close()
            self._server.close()
            raise
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting = Waiting()
        self._frames = reply_reader()
        self._read_lock = threading.Lock()  # guards the frames
        self._send_lock = threading.Lock()
        self._gone: ServerGoneError | None = None
        self._heard = _Heard.SOME
        self._fd_lock = threading.Lock()  # guards the closing of the descriptors; held for a moment only
        self._forked = False
        self._reader = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        tell_after_fork(self)
        self._reader.start()

    @property
    def usable(self) -> bool:
        """Whether calls can still be made."""
        return not self._forked and self._gone is None

    @contextlib.contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """A new seq, and the replies to it while the body runs."""
        self._check()
        talk = Conversation(self, self._waiting.next_seq())
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

    def expect(self, on_answer: OnAnswer) -> int:
        """A new seq, that of a job, whose one answer goes to `on_answer` in whatever thread reads it.

        The server reads or writes our memory for it. So where the connection ends, whoever ended it, the failure is
        told only once that is over: the server has said so, or its process is gone (its socket can close before its
        copies stop).
        """
        self._check()
        seq = self._waiting.next_seq()
        self._waiting.add_job(seq, on_answer)
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
        except DeadlineError:
            self._hang_up("a frame could not be sent in time")
            raise
        except OSError as error:
            raise self._gone or ServerGoneError(f"the server at {self._address} went away: {error}") from error
        finally:
            self._send_lock.release()

    def read_for(self, answers: queue.SimpleQueue[Answer], deadline: float) -> None:
        """Read the socket in the caller's thread until `answers` has something; returns at once where another reads."""
        if not self._read_lock.acquire(blocking=False):
            return
        try:
            poller = select.poll()
            while answers.empty() and self._gone is None and (left := deadline - time.monotonic()) > 0:
                poller.register(self._socket, select.POLLIN)
                poller.register(self._wake_fd, select.POLLIN)
                poller.poll(left * 1e3)
                self._read_some()
        finally:
            self._read_lock.release()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Hang up, fail what is waiting, end the reader. Idempotent.

        False where the server has not said within `timeout_s` that it is done with our memory; the jobs that are left
        fail when it has, or when its process is gone.
        """
        if self._forked:
            return True
        self._hang_up("the client was closed")
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def after_fork(self) -> None:
        """In a forked child: the connection belongs to the parent."""
        self._forked = True
        self._close_fds()

    def _close_fds(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        self._frames.close()
        os.close(self._wake_fd)
        self._server.close()

    def _check(self) -> None:
        if self._forked:
            raise ServerGoneError("this client belongs to the parent process; make a new one in the forked child")
        if self._gone is not None:
            raise self._gone

    def _hang_up(self, why: str) -> ServerGoneError:
        """Say nothing more; the server may still have something to say. Why the link ended."""
        gone = self._gone = self._gone or ServerGoneError(f"no connection to the server at {self._address}: {why}")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with self._fd_lock:
            if self._socket.fileno() >= 0:
                os.eventfd_write(self._wake_fd, 1)
        return gone

    def _run(self) -> None:
        """The reader's thread: whatever happens in it, the link ends and everybody who waits is told."""
        try:
            self._read_until_gone()
        except Exception as error:  # noqa: BLE001 - whatever it is, the jobs must end
            self._hang_up(f"reading failed: {error!r}")
        finally:
            gone = self._gone or self._hang_up("the reader was stopped")
            try:
                if self._waiting.fail(gone, jobs_too=False):
                    self._wait_for_copies_to_stop()
            finally:
                self._waiting.fail(gone, jobs_too=True)
                with self._read_lock, self._send_lock, self._fd_lock:
                    self._close_fds()

    def _read_until_gone(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        self._server.watch(poller)
        while self._gone is None:
            ready = poller.poll(_IDLE_MS)
            if ready and all(fd not in (self._socket.fileno(), self._wake_fd) for fd, _ in ready):
                self._hang_up("the server's process ended")  # and another that it forked holds the socket
                return
            with self._read_lock:
                self._read_some()

    def _read_some(self) -> None:
        """Take in what has come; notes it where that is the end. Needs the read lock."""
        try:
            data, fds = receive(self._socket)
            if self._heard is _Heard.GOODBYE:
                return
            if not data:
                self._heard = _Heard.ALL
                self._hang_up("the server hung up")
                return
            self._frames.feed(data, fds)
            while (frame := self._frames.next_frame()) is not None:
                if isinstance(frame.message, Closed):
                    self._heard = _Heard.GOODBYE
                    self._hang_up(frame.message.text)
                    return
                self._waiting.deliver(frame.message)
        except BlockingIOError:
            return
        except OSError as error:
            self._heard = _Heard.ALL
            self._hang_up(f"the server went away: {error}")
        except BaseException as error:
            self._frames.close()
            self._frames = reply_reader()  # what comes now may be garbage, but its end says something
            what = "the server broke the protocol" if isinstance(error, ProtocolError) else "taking in an answer failed"
            self._hang_up(f"{what}: {error}")
            if not isinstance(error, Exception):  # an interrupt, in a caller's thread
                raise

    def _wait_for_copies_to_stop(self) -> None:
        """Return once the server neither reads nor writes our memory any more, or its process is gone.

        A server that lives hangs up when its copies for us have stopped, and mostly says goodbye before. One that hung
        up without may be dying.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        self._server.watch(poller)
        while self._heard is _Heard.SOME:
            poller.poll(_IDLE_MS)
            if self._server.is_gone():
                return
            with self._read_lock:
                self._read_some()
        if self._heard is _Heard.ALL:
            self._server.wait_until_it_cannot_copy()
