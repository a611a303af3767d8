"""`kvferry serve`: the cache server in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

import typer

from kvferry.cli.sizes import format_bytes
from kvferry.client import CacheClient
from kvferry.config import ServerConfig
from kvferry.errors import KVFerryError
from kvferry.server import CacheServer

__all__ = ["run_server"]

POLL_S = 0.02


class _Ended(Exception):
    """SIGTERM or SIGINT came."""


def run_server(config: ServerConfig, *, until_stdin_closes: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, or the end of stdin; raises `KVFerryError` where the server fails.

    One line on stdout says that it is ready: that it answers, and that its memory may be stored to.
    """
    server = CacheServer(config)
    stop = threading.Event()
    announcer = threading.Thread(target=_announce, args=(config, stop), name="announcer", daemon=True)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        if until_stdin_closes:
            threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
        announcer.start()
        server.serve_forever()
    except _Ended:
        pass
    finally:
        stop.set()
        if announcer.ident is not None:
            announcer.join(15)


def _end(number: int, frame: object) -> NoReturn:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # the server is stopping already, and has a time limit for that
    raise _Ended


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(config: ServerConfig, stop: threading.Event) -> None:
    """Ask the server as any client would, until it answers and its memory is there; then say so."""
    url, started = f"unix://{config.socket_path}", time.monotonic()
    while not stop.wait(POLL_S):
        try:
            with CacheClient(url) as client:
                while client.stats()["memory_bytes"] < config.memory_bytes:
                    if stop.wait(POLL_S):
                        return
        except KVFerryError:
            continue  # not there yet; what keeps it from starting is told by the main thread
        took = time.monotonic() - started
        typer.echo(f"ready: {url}, {format_bytes(config.memory_bytes)} of host memory, after {took:.1f} s")
        return
