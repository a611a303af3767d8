"""`kvferry serve`: the cache server in the foreground."""

from __future__ import annotations

import contextlib
import pathlib
import selectors
import signal
import socket
import sys
from collections.abc import Iterator

import typer

from kvferry.cli.sizes import format_bytes
from kvferry.config import ServerConfig
from kvferry.server import CacheServer

__all__ = ["run_server"]

HEALTH_CHECK_S = 0.5


def run_server(path: pathlib.Path, memory_bytes: int, device: str, *, until_stdin_closes: bool = False) -> int:
    """Serve until SIGTERM or SIGINT (or the end of stdin); the exit code, which is not 0 where the server failed.

    One line on stdout says that it is ready.
    """
    server = CacheServer(ServerConfig(socket_path=str(path), memory_bytes=memory_bytes, device=device))
    with _signals() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        if until_stdin_closes:
            selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        server.start()
        try:
            typer.echo(f"ready: unix:{path}, {format_bytes(memory_bytes)} of host memory, device {device}")
            while not selector.select(HEALTH_CHECK_S):
                pass
        finally:
            server.stop()
    return 0


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable on SIGTERM and SIGINT, which then do nothing else."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        previous = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
