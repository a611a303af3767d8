"""`kvferry serve`: the cache server in the foreground."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

import typer

from kvferry.cli.sizes import format_bytes
from kvferry.config import ServerConfig
from kvferry.server import CacheServer

__all__ = ["run_server"]

_LOG = logging.getLogger(__name__)

POLL_S = 0.02
PROGRESS_S = 2.0


class _Ended(Exception):
    """SIGTERM or SIGINT came."""


def run_server(config: ServerConfig, *, until_stdin_closes: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, or the end of stdin; raises `KVFerryError` where the server fails.

    One line on stdout says that it is ready: that it answers, and that its memory may be stored to. What is done until
    then is logged.
    """
    server = CacheServer(config)
    stop = threading.Event()
    announcer = threading.Thread(target=_announce, args=(server, stop), name="announcer", daemon=True)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, functools.partial(_end, server))
        if until_stdin_closes:
            threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
        announcer.start()
        server.serve_forever()
    except _Ended:
        _LOG.info("stopped")
    finally:
        stop.set()
        if announcer.ident is not None:
            announcer.join(15)


def _end(server: CacheServer, number: int, frame: object) -> NoReturn:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, lambda number, frame: server.hurry())  # it is stopping already, and has a limit for that
    _LOG.info("stopping: %s came", signal.Signals(number).name)
    raise _Ended


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(server: CacheServer, stop: threading.Event) -> None:
    """Ask the server until it answers and its memory is there, and say so; what keeps it is told by the main thread."""
    started = time.monotonic()
    wanted, progress_at = server.config.memory_bytes, 0.0
    while not stop.wait(POLL_S):
        if not server.running:
            continue
        snapshot = server.snapshot()
        there, now = int(snapshot.values.get("memory_bytes", 0)), time.monotonic()
        if snapshot.values and there >= wanted:
            _say_ready(server, now - started)
            return
        if now >= progress_at and server.running:
            progress_at = now + PROGRESS_S
            text = f"starting: answers at {', '.join(server.urls)}; {_progress(there, wanted)} of memory are ready"
            _LOG.info(text, extra={"memory_ready_bytes": there, "memory_bytes": wanted})


def _say_ready(server: CacheServer, took_s: float) -> None:
    places = [*server.urls, *([] if server.metrics_url is None else [server.metrics_url])]
    memory = server.config.memory_bytes
    typer.echo(f"ready: {', '.join(places)}, {format_bytes(memory)} of host memory, after {took_s:.1f} s")
    _LOG.info("ready", extra={"urls": places, "memory_bytes": memory, "took_s": round(took_s, 3)})


def _progress(done: int, wanted: int) -> str:
    """`3 of 40 GiB`: both in the unit of the larger one."""
    number, unit = format_bytes(wanted).split(" ")
    return f"{done / wanted * float(number):.3g} of {number} {unit}"
