"""The loop thread: waits for sockets and for what other threads post, and calls whoever watches them."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvferry.errors import ServerGoneError
from kvferry.server.watch.pulse import Pulse

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
_MAX_WAIT_S = 1.0
_TURN_S = 0.005  # for what was posted, until the sockets have their turn

_T = TypeVar("_T")
Callback = Callable[[int], None]


class Loop(Generic[_T]):
    """One selector and one inbox. All but `post` and `stop` belong to the thread that runs it.

    Parameters
    ----------
    on_item
        Called with each posted item.
    on_tick
        Called after every round with the time; returns how many seconds may pass before it is called again.
    """

    def __init__(self, on_item: Callable[[_T], None], on_tick: Callable[[float], float]) -> None:
        self._on_item = on_item
        self._on_tick = on_tick
        self._selector = selectors.DefaultSelector()
        self._inbox: deque[_T] = deque()
        self._soon: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards the wake-up, whose number is somebody else's once it is closed
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, READ, self._on_wake)
        self.pulse = Pulse("the loop")

    def watch(self, fd: int, events: int, callback: Callback) -> None:
        """Call `callback(events)` whenever `fd` is ready; replaces an earlier watch of it."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Watch `fd` no more. Idempotent; call it before the descriptor is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the next round: for work that is done bit by bit, so that others have their turn."""
        self._soon.append(callback)

    def post(self, item: _T) -> None:
        """Hand over an item, from any thread; does not wait. Raises ServerGoneError once the loop is closed."""
        with self._lock:
            if self._closed:
                raise ServerGoneError("the server has stopped")
            self._inbox.append(item)
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Make `run` return soon, from any thread."""
        self._stopping.set()
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Serve until `stop`."""
        wait_s = 0.0
        while not self._stopping.is_set():
            self.pulse.beat()
            callbacks, self._soon = self._soon, []
            for key, events in self._selector.select(0.0 if callbacks else wait_s):
                if key.fd in self._selector.get_map():  # an earlier callback of this round may have forgotten it
                    key.data(events)
            for callback in callbacks:
                callback()
            wait_s = max(0.0, min(self._on_tick(time.monotonic()), _MAX_WAIT_S))

    def close(self) -> None:
        """Give the descriptors back, after `run` has returned. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            os.close(self._wake_fd)
        self._selector.close()

    def _on_wake(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)
        turn_ends_at = time.monotonic() + _TURN_S
        while self._inbox:
            self._on_item(self._inbox.popleft())
            if self._inbox and time.monotonic() > turn_ends_at:
                os.eventfd_write(self._wake_fd, 1)  # the rest in the next round, after the sockets
                return
