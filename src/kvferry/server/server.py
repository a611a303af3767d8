"""The cache server: puts the parts together, starts and stops their threads."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.cache import ChunkIndex, LeaseTable, SlabPool
from kvferry.config import ServerConfig
from kvferry.errors import DeadlineError, KVFerryError
from kvferry.server.devices import choose_devices
from kvferry.server.limits import check_memory
from kvferry.server.listener import Listener
from kvferry.server.loop import READ, Loop
from kvferry.server.memory import Memory
from kvferry.server.sessions import Admission, Sessions
from kvferry.server.state import State
from kvferry.server.tasks import (
    CacheClosed,
    CacheOpened,
    Completion,
    CopyDone,
    FdsTaken,
    MemoryReady,
    PrepareTask,
    WorkerFailed,
)
from kvferry.server.workers import Workers

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_LOG = logging.getLogger(__name__)

_STOP_S = 10.0
_ACCEPT_AGAIN_S = 0.5


class _Stop:
    """Posted to the loop: end all sessions, then the loop."""


class CacheServer:
    """Keeps KV chunks for the engines of this host, in memory that outlives them.

    One thread owns the sockets and all bookkeeping and answers lookups; one more a device maps and copies. `start` and
    `stop` are for one owner; `with` does both.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._failure: str | None = None
        self._stop_by: float | None = None
        self._accept_at = 0.0
        self._given_back = False
        self._stopped = threading.Event()
        self._loop: Loop[Completion | _Stop] = Loop(self._on_item, self._on_tick)
        self._close = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._listener: Listener
        self._state: State
        self._sessions: Sessions

    def __repr__(self) -> str:
        state = "new" if self._thread is None else "stopped" if self._stopped.is_set() else "running"
        return f"<CacheServer at {self.config.socket_path}, {state}>"

    def start(self) -> None:
        """Listen, and return; memory is made ready meanwhile, and stores are skipped until it is.

        Raises ShareError where the socket or the memory cannot be had (it names the limit), CudaUnavailableError where
        device is "cuda" and there is none.
        """
        if self._thread is not None:
            raise ValueError(f"{self!r} was started before; make a new one")
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            devices = choose_devices(self.config.device)
            check_memory(self.config.memory_bytes)
            memory = Memory(self.config.memory_bytes)
            undo.callback(memory.close)
            self._listener = Listener(self.config.socket_path, shared=bool(self.config.allow_uids))
            undo.callback(self._listener.close)
            pool = SlabPool()
            index = ChunkIndex(pool)
            workers = Workers(
                devices.make_host,
                devices.make_gpu,
                devices.gpus,
                memory_address=memory.address,
                post=self._loop.post,
            )
            leases = LeaseTable(index, self.config.lease_ttl_s)
            self._state = State(pool, index, leases, workers, max(nbytes for _, nbytes in memory.pieces))
            admission = Admission(
                own_uid=os.geteuid(), allow_uids=self.config.allow_uids, max_sessions=self.config.max_sessions
            )
            self._sessions = Sessions(self._loop, self._state, admission=admission, incarnation=secrets.token_bytes(16))
            self._on = self._handlers(self._sessions, self._state)
            self._loop.watch(self._listener.socket.fileno(), READ, self._on_connect)
            primary = workers.get(devices.primary)
            for offset, nbytes in memory.pieces:  # from here on nothing fails: the worker uses the memory
                primary.submit(PrepareTask(offset, nbytes))
            self._close = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="kvferry-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all sessions once their copies have stopped, and give everything back. Idempotent.

        Raises DeadlineError where a thread does not end in time: the memory, which it may use, is kept, and `stop` may
        be called again. Raises KVFerryError, once, where the server had ended by itself (all is given back then).
        """
        if self._thread is None or self._given_back:
            return
        self._loop.post(_Stop())
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the server's loop did not end within {_STOP_S:g} s")
        late = self._state.workers.stop(_STOP_S)
        if late:
            raise late[0]  # a worker may still use the memory, so that is kept
        self._given_back = True
        self._sessions.close()
        self._close.close()
        if self._failure is not None:
            raise KVFerryError(f"the server ended: {self._failure}")

    def serve_forever(self) -> None:
        """Start, and serve until `stop` is called in another thread or a signal handler raises.

        For a process that does nothing else: what is alive by now is taken out of garbage collection, and as many files
        may be open as the system allows (a session has two, and descriptors come in batches).

        Raises KVFerryError where the server had to end because a device, or its own loop, failed for good.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        gc.collect()
        gc.freeze()  # what is imported by now stays; without this a collection walks all of it, for 0.1 s and more
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

    def _on_connect(self, _events: int) -> None:
        try:
            sock, _ = self._listener.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _LOG.error("cannot accept connections for a while: %s", error)
            self._loop.forget(self._listener.socket.fileno())
            self._accept_at = time.monotonic() + _ACCEPT_AGAIN_S
            return
        self._sessions.accept(sock)

    def _on_tick(self, now: float) -> float:
        self._state.leases.expire(now)
        self._sessions.tick(now)
        if self._stop_by is not None:
            if not len(self._sessions) or now >= self._stop_by:  # a worker that failed closes nothing any more
                self._loop.stop()
        elif self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._loop.watch(self._listener.socket.fileno(), READ, self._on_connect)
        expiry = self._state.leases.next_expiry()
        return 0.1 if self._stop_by is not None else 1.0 if expiry is None else expiry - now

    def _on_item(self, item: Completion | _Stop) -> None:
        self._on[type(item)](item)

    def _handlers(self, sessions: Sessions, state: State) -> Mapping[type, Callable[[Any], None]]:
        """What is done with each kind of item that is posted to the loop."""
        return {
            CopyDone: sessions.jobs.on_done,
            FdsTaken: sessions.registrar.on_fds_taken,
            CacheOpened: sessions.registrar.on_opened,
            CacheClosed: sessions.registrar.on_closed,
            MemoryReady: lambda item: state.pool.add_area(item.offset, item.nbytes),
            WorkerFailed: self._on_worker_failed,
            _Stop: lambda _: self._begin_to_stop("the server is stopping"),
        }

    def _on_worker_failed(self, item: WorkerFailed) -> None:
        self._failure = f"{item.device}: {item.text}"
        self._begin_to_stop(f"the server ends because {self._failure}")

    def _begin_to_stop(self, text: str) -> None:
        self._stop_by = time.monotonic() + _STOP_S / 2
        self._loop.forget(self._listener.socket.fileno())
        self._sessions.end_all(text)
