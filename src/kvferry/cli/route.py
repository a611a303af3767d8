"""`kvferry route`: the router in the foreground."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
import threading

import typer

from kvferry.router.config import RouterConfig
from kvferry.router.service import Router

__all__ = ["run_router"]

_LOG = logging.getLogger(__name__)


def run_router(config: RouterConfig, *, until_stdin_closes: bool = False) -> None:
    """Route until SIGTERM or SIGINT, or the end of stdin; raises `KVFerryError` where an address cannot be had.

    One line on stdout says where it answers, and where it hears heartbeats. A second signal breaks off what goes on.
    """
    router = Router(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, functools.partial(_end, router))
    if until_stdin_closes:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    try:
        asyncio.run(router.run(functools.partial(_say_ready, router)))
        _LOG.info("stopped")
    finally:
        router.close()


def _end(router: Router, number: int, frame: object) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, lambda number, frame: router.hurry())
    _LOG.info("stopping: %s came", signal.Signals(number).name)
    router.stop()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say_ready(router: Router) -> None:
    heartbeats = "" if router.heartbeat_address is None else f", heartbeats at {router.heartbeat_address}"
    typer.echo(f"ready: {router.url}{heartbeats}")
    sys.stdout.flush()
    _LOG.info("ready", extra={"url": router.url, "heartbeat": router.heartbeat_address})
