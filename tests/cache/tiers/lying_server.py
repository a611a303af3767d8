"""An HTTP server that answers every request in one bad way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

Answer = Callable[[socket.socket, threading.Event], None]

_STAMP = b'ETag: "x"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n'


def says(status: str, body: bytes = b"", *, length: int | None = None) -> Answer:
    """Send `body`, and claim that it has `length` bytes; then hang up."""
    promised = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Length: {promised}\r\n".encode() + _STAMP + b"\r\n"
    return lambda sock, over: sock.sendall(head + body)


def hangs(before: Answer | None = None) -> Answer:
    """Say nothing, or nothing more, until the test is over."""

    def answer(sock: socket.socket, over: threading.Event) -> None:
        if before is not None:
            before(sock, over)
        over.wait(60)

    return answer


def trickles(sock: socket.socket, over: threading.Event) -> None:
    """A byte now and then."""
    says("200 OK", length=1 << 20)(sock, over)
    while not over.wait(0.05):
        sock.sendall(b"x")


def raw(data: bytes) -> Answer:
    return lambda sock, over: sock.sendall(data)


class LyingServer:
    """Accepts in one thread, answers each connection's first request in one more; all end with the block."""

    def __init__(self, answer: Answer) -> None:
        self.num_requests = 0
        self.heads: list[bytes] = []
        self._answer = answer
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> LyingServer:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._accepting.join(20)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the client may hang up whenever it likes
            sock.settimeout(20)
            head = b""
            while b"\r\n\r\n" not in head:
                data = sock.recv(65536)
                if not data:
                    return
                head += data
            self.num_requests += 1
            self.heads.append(head)
            self._answer(sock, self._over)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):  # a reset would take the answer from the client
                pass
