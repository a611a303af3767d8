"""The thread of an engine's loop: waits for ZMQ sockets and for what other threads post."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import zmq

from kvferry.errors import DeadlineError, TransferError
from kvferry.ipc.forks import tell_after_fork

_LOG = logging.getLogger(__name__)
_MAX_WAIT_S = 0.5
_MIN_WAIT_S = 50e-6
_ZMQ_WAITS_S = 0.001  # the shortest time that its poll can wait
_END_S = 10.0
_ANSWER_S = 10.0

_T = TypeVar("_T")

Call = Callable[[], None]


class Loop:
    """Runs `kvferry-p2p`. All but `start`, `post`, `ask` and `close` belong to that thread."""

    def __init__(self, on_tick: Callable[[float], float], on_end: Call) -> None:
        """`on_tick(now)` says when to come again; `on_end` is the last that the thread calls."""
        self._on_tick = on_tick
        self._on_end = on_end
        self._watched: dict[zmq.Socket[bytes], Call] = {}
        self._poller = zmq.Poller()
        self._inbox: deque[Call] = deque()
        # The wake-up's number is nobody else's while it is written to. A finaliser may post in the midst of a post.
        self._lock = threading.RLock()
        self._closing = False
        self._next_at = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p", daemon=True)

    def start(self) -> None:
        tell_after_fork(self)
        self._thread.start()

    def after_fork(self) -> None:
        """In a forked child there is no thread: the engine is closed there."""
        self._lock = threading.RLock()
        self._closing = True

    def watch(self, sock: zmq.Socket[bytes], on_readable: Call) -> None:
        """Call `on_readable` whenever there is a message."""
        self._watched[sock] = on_readable
        self._poller.register(sock, zmq.POLLIN)

    def forget(self, sock: zmq.Socket[bytes]) -> None:
        """Before the socket is closed. Idempotent."""
        if self._watched.pop(sock, None) is not None:
            self._poller.unregister(sock)

    def post(self, call: Call) -> None:
        """Have the thread call it, from any thread. Raises TransferError ("closed") once it ends."""
        with self._lock:
            if self._closing:
                raise TransferError("closed", "this engine is closed")
            self._inbox.append(call)
            os.eventfd_write(self._wake_fd, 1)

    def ask(self, question: Callable[[], _T]) -> _T:
        """What the thread answers. Raises TransferError ("closed"), DeadlineError where it does not answer."""
        answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self.post(lambda: answers.put(question()))
        try:
            return answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise DeadlineError(f"the thread of the p2p engine did not answer within {_ANSWER_S:g} s") from None

    def close(self) -> None:
        """End the thread, after all that was posted. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._thread.is_alive():
            _LOG.error("the thread of the p2p engine did not end within %g s: its transfers are not over", _END_S)
        os.close(self._wake_fd)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing:
            if wait_s < _ZMQ_WAITS_S:
                time.sleep(wait_s)
            for ready, _ in self._poller.poll(int(wait_s * 1e3)):
                if ready == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif ready in self._watched:  # an earlier call of this round may have forgotten it
                    _guarded(self._watched[ready])
            while self._inbox:
                _guarded(self._inbox.popleft())
            _guarded(self._tick)
            wait_s = min(max(self._next_at - time.monotonic(), _MIN_WAIT_S), _MAX_WAIT_S)
        while self._inbox:
            _guarded(self._inbox.popleft())
        _guarded(self._on_end)

    def _tick(self) -> None:
        now = time.monotonic()
        self._next_at = now + _MAX_WAIT_S
        self._next_at = self._on_tick(now)


def _guarded(call: Call) -> None:
    """A mistake in one call must not end the thread that all transfers depend on."""
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it is
        _LOG.exception("a call of the p2p loop failed")
