"""A server made of a socket and a function: what it answers to each request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.protocol.framing import encode_frame, receive, request_reader
from kvferry.protocol.messages import Hello, Message, Request, Welcome

Answer = Callable[[Request], Sequence[Message]]


class ScriptedServer:
    """Takes one client after the other; `requests` are all that came after the greetings."""

    def __init__(self, path: Path, answer: Answer, *, version: int = 2, heartbeat_s: float = 0.0) -> None:
        self.requests: list[Request] = []
        self._answer = answer
        self._welcome = Welcome(version, b"i" * 16, heartbeat_s=heartbeat_s)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="scripted-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._peer is not None:
            with contextlib.suppress(OSError):  # it has hung up itself
                self._peer.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                self._peer, _ = self._listener.accept()
                with self._peer:
                    self._serve(self._peer)
            except OSError:
                return  # closed

    def _serve(self, peer: socket.socket) -> None:
        reader = request_reader()
        while True:
            data, fds = receive(peer)
            if not data:
                return
            reader.feed(data, fds)
            while (frame := reader.next_frame()) is not None:
                if isinstance(frame.message, Hello):
                    answers: Sequence[Message] = [self._welcome]
                else:
                    self.requests.append(frame.message)
                    answers = self._answer(frame.message)
                for answer in answers:
                    peer.sendall(encode_frame(answer))
