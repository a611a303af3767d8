"""A server made of a socket, which says what a test tells it to; and waiting for answers."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from kvferry.client.waiting import Answer
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Message


class Server:
    """A server of this very process, which therefore never ends; it says what it is told to."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self.peer: socket.socket | None = None

    def greet(self, *messages: Message) -> threading.Thread:
        """Take one client in a thread, and send `messages`."""

        def run() -> None:
            if self.peer is not None:
                self.peer.close()
            try:
                self.peer, _ = self._listener.accept()
            except OSError:
                return  # closed, and nobody had come
            for message in messages:
                self.peer.sendall(encode_frame(message))

        thread = threading.Thread(target=run, name="link-server", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def hang_up(self) -> None:
        assert self.peer is not None
        self.peer.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that accepts, which closing alone does not
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        if self.peer is not None:
            self.peer.close()


def until(answers: list[Answer], count: int = 1) -> None:
    deadline = time.monotonic() + 20
    while len(answers) < count and time.monotonic() < deadline:
        time.sleep(0.002)
