"""The router as a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator

import uvicorn

from kvferry import __version__
from kvferry.errors import ShareError
from kvferry.router.app import make_app
from kvferry.router.calls import EngineCalls
from kvferry.router.config import RouterConfig
from kvferry.router.engines import Engines
from kvferry.router.front import Front
from kvferry.router.heartbeat import read_secret
from kvferry.router.listener import HeartbeatListener
from kvferry.router.measures import Measures
from kvferry.router.tasks import end_tasks
from kvferry.settings import join_host_port, split_host_port

__all__ = ["Router"]

_LOG = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep what they do not use, so that they close it
_TICK_S = 0.05
_FILES_A_REQUEST, _FILES_BESIDE = 3, 64
_LAST_WORDS_S = 5.0


class _Uvicorn(uvicorn.Server):
    """Whoever runs the router says what a signal does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """Listens when made, answers in `run`. All of it in one thread, `stop` and `hurry` also in a signal's handler."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ShareError where the address for clients cannot be had, ValueError for a secret that is none."""
        self.config = config
        self._secret = None if config.token_file is None else read_secret(config.token_file)
        self._socket = _listen(config.listen)
        host, _ = split_host_port(config.listen)
        self.url = f"http://{join_host_port(host, self._socket.getsockname()[1])}"
        self.heartbeat_address: str | None = None
        self._stopping = False
        self._hurried = False

    def __repr__(self) -> str:
        return f"<Router at {self.url}>"

    def stop(self) -> None:
        """Take no more requests, and end once those that go on have ended, or drain-s is over."""
        self._stopping = True

    def hurry(self) -> None:
        """Break off what goes on."""
        self._stopping = self._hurried = True

    def close(self) -> None:
        """Idempotent; for after `run`, or instead of it."""
        self._socket.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Answer until `stop`; `ready` is called once it does. Raises ShareError where heartbeats cannot be heard."""
        _raise_open_files(self.config.max_requests)
        measures = Measures()
        with contextlib.ExitStack() as stack:
            calls = EngineCalls()
            front = Front(self.config, calls, Engines(self.config, calls, measures), measures)
            jobs = []
            if self.config.heartbeat is not None:
                engines = front.engines
                listener = HeartbeatListener(self.config.heartbeat, engines.take, engines.refused, secret=self._secret)
                stack.callback(listener.close)
                self.heartbeat_address = listener.address
                jobs.append(listener.run())
            server = _Uvicorn(self._uvicorn_config(front))
            jobs += [front.engines.watch(), front.engines.probe()]
            await _run_all([*jobs, self._serve(server), self._await_stop(server, front, ready)], until=len(jobs))

    async def _serve(self, server: uvicorn.Server) -> None:
        await server.serve(sockets=[self._socket])

    async def _await_stop(self, server: uvicorn.Server, front: Front, ready: Callable[[], None]) -> None:
        """Say when it is ready, and see it through its end."""
        while not server.started and not self._stopping:
            await asyncio.sleep(_TICK_S)
        if server.started:
            ready()
        while not self._stopping:
            await asyncio.sleep(_TICK_S)
        server.should_exit = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.drain_s
        while front.num_requests and loop.time() < deadline and not self._hurried:
            await asyncio.sleep(_TICK_S)
        if front.num_requests:
            _LOG.warning("%d requests are broken off", front.num_requests)
        front.ended.set_result(None)

    def _uvicorn_config(self, front: Front) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(front),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("server", f"kvferry/{__version__}")],
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(self.config.drain_s + _LAST_WORDS_S) + 1,
        )


async def _run_all(jobs: list[Coroutine[object, object, None]], until: int) -> None:
    """Run them until the one at place `until` has ended; where another fails before, raise what it raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        while not tasks[until].done():
            done, _ = await asyncio.wait(
                [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
    finally:
        await end_tasks(tasks)


def _raise_open_files(max_requests: int) -> None:
    """Of connections a request has three, while the limit that many systems begin with is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = _FILES_A_REQUEST * max_requests + _FILES_BESIDE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        _LOG.warning("the limit of open files is %d (`ulimit -Hn`); %d requests want %d", hard, max_requests, wanted)


def _listen(address: str) -> socket.socket:
    host, port = split_host_port(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ShareError(f"clients cannot be heard at {address}: {error}; choose another address") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ShareError(f"clients cannot be heard at {address}: {error}; choose another address") from error
    return sock
