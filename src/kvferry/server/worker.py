"""One thread a device: it alone maps engines' memory there, and copies. Tasks come in, completions go out."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvferry.errors import DeadlineError, KVFerryError
from kvferry.ipc.table import process_table
from kvferry.server.copies import CopyQueue
from kvferry.server.device import Device
from kvferry.server.failures import failure_of
from kvferry.server.opened import OpenedCache
from kvferry.server.tasks import (
    CacheClosed,
    CacheOpened,
    CloseTask,
    Completion,
    CopyDone,
    CopyTask,
    Failure,
    FdsTaken,
    FdsTask,
    MemoryReady,
    OpenTask,
    PrepareTask,
    Task,
    WorkerFailed,
)

_LOG = logging.getLogger(__name__)

_IDLE_S = 1.0
_DRAIN_S = 10.0


class DeviceWorker:
    """Runs one device's tasks in a thread of its own.

    Parameters
    ----------
    make_device
        Called in the worker's thread. Where it raises, the worker refuses all that comes, and `failed` is set.
    memory_address
        Where the server's memory for chunks begins.
    post
        Takes completions; called in the worker's thread, must not wait.
    """

    def __init__(
        self, name: str, make_device: Callable[[], Device], *, memory_address: int, post: Callable[[Completion], None]
    ) -> None:
        self.name = name
        self.failed = False
        self._make_device = make_device
        self._memory_address = memory_address
        self._post = post
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._caches: dict[int, OpenedCache] = {}
        self._copies = CopyQueue(self._caches, memory_address=memory_address, post=post)
        self._preparing: deque[PrepareTask] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)

    def __repr__(self) -> str:
        return f"<DeviceWorker {self.name}: {len(self._caches)} caches>"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Hand over a task, from any thread. A CloseTask also stops the cache's copy that is running."""
        if isinstance(task, CloseTask):
            self._copies.end_cache(task.cache_id)
        self._tasks.put(task)

    def cancel(self, job_id: int) -> None:
        """Stop a copy that was submitted and is not done, from any thread; its CopyDone still comes."""
        self._copies.cancel(job_id)

    def settle(self, job_id: int) -> None:
        """The copy's CopyDone has been seen."""
        self._copies.settle(job_id)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close all caches and end the thread. Raises DeadlineError where it does not end in time."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the worker of {self.name} did not end within {timeout_s} s")

    def _run(self) -> None:
        try:
            device = self._make_device()
        except KVFerryError as error:
            self.failed = True
            self._refuse_all(failure_of(error))
            return
        try:
            while self._take_tasks(device):
                self._prepare_some(device)
                self._copies.poll()
                self._copies.step(device)
        except Exception as error:  # noqa: BLE001 - the thread's last act is to say why the server has to end
            _LOG.exception("the worker of %s failed", self.name)
            self._post(WorkerFailed(self.name, f"{type(error).__name__}: {error}"))
        finally:
            for cache_id in list(self._caches):
                self._close(cache_id)
            device.close()

    def _refuse_all(self, failure: Failure) -> None:
        """The device cannot be used: answer all that comes until the worker is stopped."""
        while (task := self._tasks.get()) is not None:
            if isinstance(task, OpenTask):
                self._post(CacheOpened(task.cache_id, failure=failure))
            elif isinstance(task, PrepareTask):
                self._post(WorkerFailed(self.name, failure.text))
            else:
                self._without_cache(task)

    def _take_tasks(self, device: Device) -> bool:
        """Do all small tasks that have come; waits for one where there is nothing else to do. False to end."""
        wait_s = 0.0 if self._preparing else self._copies.wait_s
        try:
            task = self._tasks.get(timeout=_IDLE_S if wait_s is None else wait_s)
            while task is not None:
                self._handle(task)
                task = self._tasks.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle(self, task: Task) -> None:
        if isinstance(task, CopyTask):
            self._copies.add(task)
        elif isinstance(task, PrepareTask):
            self._preparing.append(task)
        elif isinstance(task, OpenTask):
            self._open(task)
        elif task.cache_id not in self._caches:
            self._without_cache(task)
        elif isinstance(task, FdsTask):
            self._take_fds(task)
        else:
            self._copies.drop_cache(task.cache_id)
            self._close(task.cache_id)
            self._post(CacheClosed(task.cache_id))

    def _open(self, task: OpenTask) -> None:
        try:
            self._caches[task.cache_id] = OpenedCache(task)
        except KVFerryError as error:
            self._post(CacheOpened(task.cache_id, failure=failure_of(error)))
            return
        self._post(FdsTaken(task.cache_id, 0))
        self._finish_if_complete(task.cache_id)

    def _take_fds(self, task: FdsTask) -> None:
        cache = self._caches[task.cache_id]
        try:
            cache.take_fds(task.fds)
        except (KVFerryError, OSError) as error:
            self._refuse(task.cache_id, error)
            return
        self._post(FdsTaken(task.cache_id, cache.received))
        self._finish_if_complete(task.cache_id)

    def _finish_if_complete(self, cache_id: int) -> None:
        cache = self._caches[cache_id]
        if not cache.complete:
            return
        try:
            nonces = cache.finish()
        except (KVFerryError, RuntimeError) as error:  # torch reports its own as RuntimeError
            self._refuse(cache_id, error)
            return
        self._post(CacheOpened(cache_id, nonces))

    def _refuse(self, cache_id: int, error: Exception) -> None:
        failure = failure_of(error)
        self._close(cache_id)
        self._post(CacheOpened(cache_id, failure=failure))

    def _without_cache(self, task: Task) -> None:
        """What is left to do for a cache that is not open here (any more)."""
        if isinstance(task, FdsTask):
            for fd in task.fds:
                os.close(fd)
        elif isinstance(task, CloseTask):
            self._copies.drop_cache(task.cache_id)
            self._post(CacheClosed(task.cache_id))
        elif isinstance(task, CopyTask):
            self._post(CopyDone(task.cache_id, task.job_id, 0, Failure("cancelled", "the cache is closed")))

    def _close(self, cache_id: int) -> None:
        """Unmap a cache, and wait until it is unmapped; problems are logged, since nobody is left to hear of them."""
        for error in self._caches.pop(cache_id).close():
            _LOG.error("closing cache %d of %s: %s", cache_id, self.name, error)
        try:
            process_table().mappings.drain(_DRAIN_S)
        except DeadlineError as error:
            _LOG.error("closing cache %d of %s: %s", cache_id, self.name, error)

    def _prepare_some(self, device: Device) -> None:
        """Prepare one piece of memory, of a size that holds up nobody."""
        if not self._preparing:
            return
        task = self._preparing.popleft()
        nbytes = min(device.prepare_bytes, task.nbytes - task.done)
        device.prepare(self._memory_address + task.offset + task.done, nbytes)
        task = replace(task, done=task.done + nbytes)
        if task.done == task.nbytes:
            self._post(MemoryReady(task.offset, task.nbytes))
        else:
            self._preparing.appendleft(task)
