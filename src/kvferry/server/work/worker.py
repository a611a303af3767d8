"""One thread a device: it alone maps engines' memory there, and copies. Tasks come in, completions go out."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvferry.errors import DeadlineError, KVFerryError
from kvferry.server.failures import failure_of
from kvferry.server.watch.pulse import Pulse
from kvferry.server.work.copies import CopyQueue
from kvferry.server.work.device import Device
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import (
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
from kvferry.server.work.unmapping import Unmappings

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T", OpenTask, FdsTask)

_IDLE_S = 1.0


class DeviceWorker:
    """Runs one device's tasks in a thread of its own.

    Parameters
    ----------
    make_device
        Called in the worker's thread, by the first task that needs it. Where it raises, that task is refused, and the
        next one tries again.
    memory_address
        Where the server's memory for chunks begins.
    post
        Takes completions; called in the worker's thread, must not wait.
    """

    def __init__(
        self, name: str, make_device: Callable[[], Device], *, memory_address: int, post: Callable[[Completion], None]
    ) -> None:
        self.name = name
        self.pulse = Pulse(f"the worker of {name}")
        self._make_device = make_device
        self._memory_address = memory_address
        self._post = post
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._caches: dict[int, OpenedCache] = {}
        self._unmappings = Unmappings(name, post)
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
        if self._thread.ident is not None:  # a signal may have come before it was started
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the worker of {self.name} did not end within {timeout_s} s")

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            if not isinstance(task, (OpenTask, PrepareTask)):
                self._without_cache(task)
                continue
            try:
                with self.pulse.step("setting up the device"):
                    device = self._make_device()
            except Exception as error:  # noqa: BLE001 - whatever it is, the engine is told, and others are served
                _LOG.exception("the device %s cannot be used", self.name)
                self._refuse_task(task, failure_of(error))
            else:
                self._use(device, task)
                return

    def _use(self, device: Device, first: Task) -> None:
        failure: Failure | None = None
        try:
            self._handle(first, device)
            while self._take_tasks(device):
                with self.pulse.step("preparing memory"):
                    self._prepare_some(device)
                with self.pulse.step("asking events"):
                    self._copies.poll()
                with self.pulse.step("a copy"):
                    self._copies.step(device)
        except Exception as error:  # noqa: BLE001 - the worker's last act is to say why the server has to end
            _LOG.exception("the worker of %s failed", self.name)
            failure = Failure("device", f"{type(error).__name__}: {error}")
            self._post(WorkerFailed(self.name, failure.text))
        finally:
            for cache_id in list(self._caches):
                self._let_go(cache_id)
            self._unmappings.finish()
            self._close_device(device)
        while failure is not None and (task := self._next_task()) is not None:
            self._refuse_task(task, failure)

    def _next_task(self) -> Task | None:
        """The next task, however long that takes; None to end."""
        while True:
            self.pulse.beat()
            self._unmappings.look()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=self._unmappings.wait_s or _IDLE_S)

    def _refuse_task(self, task: Task, failure: Failure) -> None:
        """The device cannot be used."""
        if isinstance(task, OpenTask):
            self._post(CacheOpened(task.cache_id, failure=failure))
        elif isinstance(task, PrepareTask):
            self._post(WorkerFailed(self.name, failure.text))
        else:
            self._without_cache(task)

    def _take_tasks(self, device: Device) -> bool:
        """Do all small tasks that have come; waits for one where there is nothing else to do. False to end."""
        self.pulse.beat()
        self._unmappings.look()
        waits = (0.0 if self._preparing else None, self._copies.wait_s, self._unmappings.wait_s, _IDLE_S)
        try:
            task = self._tasks.get(timeout=min(wait for wait in waits if wait is not None))
            while task is not None:
                with self.pulse.step(type(task).__name__):
                    self._handle(task, device)
                task = self._tasks.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle(self, task: Task, device: Device) -> None:
        if isinstance(task, CopyTask):
            self._copies.add(task)
        elif isinstance(task, PrepareTask):
            self._preparing.append(task)
        elif isinstance(task, OpenTask):
            self._try_to_open(task, device, self._open)
        elif task.cache_id not in self._caches:
            self._without_cache(task)
        elif isinstance(task, FdsTask):
            self._try_to_open(task, device, self._take_fds)
        else:
            self._end_cache(task.cache_id)

    def _try_to_open(self, task: _T, device: Device, step: Callable[[_T], None]) -> None:
        """Take one step towards an open cache. What goes wrong is that cache's own, unless the device is lost by it."""
        try:
            step(task)
        except Exception as error:
            if not isinstance(error, KVFerryError):
                _LOG.exception("cache %d of %s cannot be opened", task.cache_id, self.name)
            self._let_go(task.cache_id)
            self._post(CacheOpened(task.cache_id, failure=failure_of(error)))
            if device.is_fatal(error):
                raise

    def _open(self, task: OpenTask) -> None:
        self._caches[task.cache_id] = OpenedCache(task)
        self._post(FdsTaken(task.cache_id, 0))
        self._finish_if_complete(task.cache_id)

    def _take_fds(self, task: FdsTask) -> None:
        cache = self._caches[task.cache_id]
        cache.take_fds(task.fds)
        self._post(FdsTaken(task.cache_id, cache.received))
        self._finish_if_complete(task.cache_id)

    def _finish_if_complete(self, cache_id: int) -> None:
        cache = self._caches[cache_id]
        if cache.complete:
            self._post(CacheOpened(cache_id, cache.finish()))

    def _without_cache(self, task: Task) -> None:
        """What is left to do for a cache that is not open here (any more)."""
        if isinstance(task, FdsTask):
            for fd in task.fds:
                os.close(fd)
        elif isinstance(task, CloseTask):
            self._end_cache(task.cache_id)
        elif isinstance(task, CopyTask):
            self._post(CopyDone(task.cache_id, task.job_id, 0, Failure("cancelled", "the cache is closed")))

    def _end_cache(self, cache_id: int) -> None:
        """Drop a cache, if it is open, and say whether anything of it is still mapped."""
        self._let_go(cache_id)
        self._unmappings.answer(cache_id)

    def _let_go(self, cache_id: int) -> None:
        """End a cache's jobs, and stop using it. Nothing where it is not open."""
        self._copies.drop_cache(cache_id)
        cache = self._caches.pop(cache_id, None)
        if cache is not None:
            self._unmappings.let_go(cache_id, cache)

    def _close_device(self, device: Device) -> None:
        try:
            device.close()
        except KVFerryError as error:
            _LOG.error("closing the device %s: %s", self.name, error)

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
