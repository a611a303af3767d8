"""Takes connections off a listening socket, and waits where the system has none to give."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from kvferry.server.net.loop import READ, Loop

_LOG = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.5


class Acceptor:
    """Belongs to the loop thread. The listening socket is somebody else's; `take` owns each connection it gets."""

    def __init__(self, loop: Loop[Any], listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._loop = loop
        self._listening = listening
        self._take = take
        self._again_at: float | None = None
        self._stopped = False
        self._loop.watch(listening.fileno(), READ, self._on_ready)

    def tick(self, now: float) -> None:
        """Go on after a pause."""
        if self._again_at is not None and now >= self._again_at and not self._stopped:
            self._again_at = None
            self._loop.watch(self._listening.fileno(), READ, self._on_ready)

    def stop(self) -> None:
        """Take no more connections. Idempotent."""
        self._stopped = True
        self._loop.forget(self._listening.fileno())

    def _on_ready(self, _events: int) -> None:
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _LOG.error("cannot accept connections for a while: %s", error)
            self._loop.forget(self._listening.fileno())
            self._again_at = time.monotonic() + _ACCEPT_AGAIN_S
            return
        self._take(sock)
