"""Copies and lanes of the carriers that push that go on when they are told to, and move real bytes."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.errors import NcclPeerError
from kvferry.p2p.carriers.pushes.run import Part, Run

Action = Callable[[], object]


class Slow:
    """The copies of one buffer: each is done when it is told to, after those before it."""

    def __init__(self, check: Callable[[Part, bool], None]) -> None:
        """`check` is called with each part that is copied, and whether that is into a slot."""
        self._check = check
        self.pending: deque[tuple[Part, int, Callable[[Exception | None], None], bool]] = deque()

    def prepare(self, run: Run) -> None:
        """Nothing."""

    def copy(self, part: Part, slot: int, on_done: Callable[[Exception | None], None], *, to_flat: bool) -> None:
        self.pending.append((part, slot, on_done, to_flat))

    def end(self, error: Exception | None = None) -> None:
        """One that fails has copied a part of what it should have."""
        part, slot, on_done, to_flat = self.pending.popleft()
        self._check(part, to_flat)
        for address, distance, nbytes in part.ranges():
            ends = (slot + distance, address) if to_flat else (address, slot + distance)
            ctypes.memmove(*ends, nbytes if error is None else nbytes // 2)
        on_done(error)


class Lane:
    """One end of one direction of a session. `tasks` are those of its thread."""

    def __init__(self) -> None:
        self.tasks: deque[Action] = deque()
        self.exchanges: deque[tuple[tuple[int, int], Future[None]]] = deque()
        self._aborted = ""

    def exchange(self, *, sends: Any = (), receives: Any = (), timeout_s: float) -> Future[None]:
        del timeout_s
        future: Future[None] = Future()
        if self._aborted:
            future.set_exception(NcclPeerError(self._aborted))
        else:
            self.exchanges.append(((*sends, *receives)[0], future))
        return future

    def call(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def abort(self, reason: str) -> Future[None]:
        self.tasks.append(partial(self._abort, reason))
        return Future()

    def _abort(self, reason: str) -> None:
        self._aborted = reason
        while self.exchanges:
            self.exchanges.popleft()[1].set_exception(NcclPeerError(reason))


def exchanged(sender: Lane, receiver: Lane) -> None:
    """What both have launched: both ends are of as many bytes."""
    (source, sent_bytes), sent = sender.exchanges.popleft()
    (target, nbytes), received = receiver.exchanges.popleft()
    assert sent_bytes == nbytes
    ctypes.memmove(target, source, nbytes)
    for lane, future in ((sender, sent), (receiver, received)):
        lane.tasks.append(partial(future.set_result, None))
