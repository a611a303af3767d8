"""The cache server: starts and stops the threads of its parts, and says why it ended."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

from kvferry.config import ServerConfig
from kvferry.errors import DeadlineError, KVFerryError
from kvferry.server.assembly import Parts, assemble
from kvferry.server.garbage import Garbage
from kvferry.server.net.loop import Loop
from kvferry.server.net.patience import Patience
from kvferry.server.net.rounds import TICK_S
from kvferry.server.watch.snapshots import Snapshot
from kvferry.server.work.tasks import WorkerFailed

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_LOG = logging.getLogger(__name__)

_STOP_S = 10.0
_PATIENCE = Patience()


class _Stop:
    """Posted to the loop: end all sessions, then the loop."""


class CacheServer:
    """Keeps KV chunks for the engines of this host, in memory that outlives them.

    One thread owns the sockets and all bookkeeping and answers lookups; one more a device maps and copies. `start` and
    `stop` are for one owner; `with` does both.
    """

    def __init__(self, config: ServerConfig, *, patience: Patience = _PATIENCE) -> None:
        self.config = config
        self._patience = patience
        self._failure: str | None = None
        self._ends_since: float | None = None
        self._drain_s = config.drain_s
        self._given_back = False
        self._stopped = threading.Event()
        self._loop: Loop[Any] = Loop(self._on_item, self._on_tick)
        self._close = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._parts: Parts

    def __repr__(self) -> str:
        state = "new" if self._thread is None else "running" if self.running else "stopped"
        return f"<CacheServer at {self.config.socket_path}, {state}>"

    @property
    def running(self) -> bool:
        """Whether it has started, and has not ended."""
        return self._thread is not None and not self._stopped.is_set()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where clients find the server once it is started, with the ports that the system has chosen."""
        return tuple(map(str, self._parts.addresses))

    @property
    def metrics_url(self) -> str | None:
        """Where the metrics are once it is started, with the port that the system has chosen; None without any."""
        return None if self._parts.metrics is None else self._parts.metrics.url

    def snapshot(self) -> Snapshot:
        """The values of `stats` and the health of a started server, from any thread; takes a second at most."""
        return self._parts.snapshots.take()

    def start(self) -> None:
        """Listen, and return; memory is made ready meanwhile, and stores are skipped until it is.

        Raises ShareError where the socket or the memory cannot be had (it names the limit), CudaUnavailableError where
        device is "cuda" and there is none.
        """
        if self._thread is not None:
            raise ValueError(f"{self!r} was started before; make a new one")
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            self._parts = assemble(self.config, self._loop, undo, patience=self._patience)
            self._close = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="kvferry-loop", daemon=True)
        self._thread.start()
        if self._parts.metrics is not None:
            self._parts.metrics.start()

    def hurry(self) -> None:
        """Let the end wait no longer for the lower tiers. From any thread, and signal handlers."""
        self._drain_s = 0.0

    def stop(self) -> None:
        """End all sessions once their copies have stopped, and give everything back. Idempotent.

        Raises DeadlineError where a thread does not end in time: the memory, which it may use, is kept, and `stop` may
        be called again. Raises KVFerryError, once, where the server had ended by itself (all is given back then).
        """
        if self._thread is None or self._given_back:
            return
        self._loop.post(_Stop())
        limit_s = _STOP_S + self._drain_s
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the server's loop did not end within {limit_s:g} s")
        late = self._parts.stop_threads(_STOP_S)
        if late:
            raise late[0]  # a thread may still use the memory, so that is kept
        self._given_back = True
        self._parts.sessions.close()
        self._close.close()
        if self._failure is not None:
            raise KVFerryError(f"the server ended: {self._failure}")

    def serve_forever(self) -> None:
        """Start, and serve until `stop` is called in another thread or a signal handler raises.

        For a process that does nothing else: what lives long is taken out of garbage collection, and as many files may
        be open as the system allows (a session has two, and descriptors come in batches).

        Raises KVFerryError where the server had to end because a device, or its own loop, failed for good.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with Garbage():
            try:
                self.start()
                while not self._stopped.wait(1.0):
                    pass
            finally:
                self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - a server without its loop has to end, and say why
            _LOG.exception("the server's loop failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._stopped.set()

    def _on_tick(self, now: float) -> float:
        parts = self._parts
        parts.state.leases.expire(now)
        parts.sessions.tick(now)
        parts.sessions.lookups.tick(now)
        parts.state.tiers.tick(now)
        sweeping = parts.state.index.sweep(TICK_S)
        parts.health.tick(now)
        if self._ends_since is not None:
            took_s = now - self._ends_since
            ended = not len(parts.sessions) or took_s >= _STOP_S / 2  # a worker that failed closes nothing any more
            if ended and (parts.state.tiers.idle or took_s >= self._drain_s):
                parts.state.tiers.tell_left()
                self._loop.stop()
            return 0.0 if parts.state.tiers.more else 0.1
        for acceptor in parts.acceptors:
            acceptor.tick(now)
        if sweeping or parts.state.tiers.more:
            return 0.0
        times = (parts.state.leases.next_expiry(), parts.sessions.lookups.next_deadline())
        return min([1.0, *(time - now for time in times if time is not None)])

    def _on_item(self, item: object) -> None:
        if isinstance(item, _Stop):
            self._begin_to_stop("the server is stopping")
        elif isinstance(item, WorkerFailed):
            self._failure = f"{item.device}: {item.text}"
            self._parts.health.fail(self._failure)
            self._begin_to_stop(f"the server ends because {self._failure}")
        else:
            self._parts.handlers[type(item)](item)

    def _begin_to_stop(self, text: str) -> None:
        if self._ends_since is not None:
            return
        self._ends_since = time.monotonic()
        for acceptor in self._parts.acceptors:
            acceptor.stop()
        self._parts.sessions.end_all(text)
        self._parts.state.tiers.flush()
