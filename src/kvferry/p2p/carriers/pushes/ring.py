"""A thread that fills and empties slots."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvferry.p2p.carriers.pushes.buffers import OnDone
from kvferry.p2p.carriers.pushes.run import Part, Run

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
_END_S = 20.0

Call = Callable[[], None]
Wait = Callable[[], object]


class Ring(ABC):
    """Slots of `slot_bytes` bytes at `addresses`, allocated once. Runs `kvferry-p2p-ring`.

    That thread alone copies, one part after the other, or as many at once as `depth` says, and calls `on_done`.
    """

    depth = 1

    def __init__(self, addresses: tuple[int, ...], slot_bytes: int) -> None:
        self.addresses = addresses
        self.slot_bytes = slot_bytes
        self._running: deque[tuple[Wait, OnDone]] = deque()
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-ring", daemon=True)
        self._thread.start()

    def copy(self, part: Part, slot: int, on_done: OnDone, *, to_flat: bool) -> None:
        """Queue it. For any thread."""
        self._jobs.put(lambda: self._begin(part, slot, on_done, to_flat=to_flat))

    def close(self) -> None:
        """End the thread after what was queued, and free all. Nobody else may use the slots any more. Idempotent."""
        self._jobs.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _LOG.error("the copies of a ring of slots did not end within %g s", _END_S)
            return
        self._free()

    @abstractmethod
    def prepare(self, run: Run) -> None:
        """Work out what the copies of a run will need. In any thread."""

    @abstractmethod
    def _copy(self, part: Part, slot: int, *, to_flat: bool) -> Wait:
        """Start a copy, of which at most `depth` are under way; what is returned waits for it. In the ring's thread."""

    @abstractmethod
    def _free(self) -> None:
        """Give the memory back. Idempotent."""

    def _around(self) -> AbstractContextManager[None]:
        """What the thread runs in."""
        return contextlib.nullcontext()

    def _run(self) -> None:
        with self._around():
            while True:
                try:
                    job = self._jobs.get(timeout=0 if self._running else _IDLE_S)
                except queue.Empty:
                    self._finish()
                    continue
                if job is None:
                    break
                job()
                del job  # it keeps the memory that was copied, such as KV caches that are not registered any more
            while self._running:
                self._finish()

    def _begin(self, part: Part, slot: int, on_done: OnDone, *, to_flat: bool) -> None:
        while len(self._running) >= self.depth:
            self._finish()
        try:
            wait = self._copy(part, slot, to_flat=to_flat)
        except Exception as problem:  # noqa: BLE001 - whoever waits must be told, after those before it
            while self._running:
                self._finish()
            _tell(on_done, problem)
        else:
            self._running.append((wait, on_done))

    def _finish(self) -> None:
        """Wait for the copy that was started first, if there is one."""
        if not self._running:
            return
        wait, on_done = self._running.popleft()
        error: Exception | None = None
        try:
            wait()
        except Exception as problem:  # noqa: BLE001 - whoever waits must be told
            error = problem
        _tell(on_done, error)


def _tell(on_done: OnDone, error: Exception | None) -> None:
    if error is not None:
        _LOG.error("a copy of a ring of slots failed: %s", error, exc_info=error)
    on_done(error)
