"""Questions to the cache server, asked by a thread of their own: vLLM's scheduler does not wait for the network."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.client import CacheClient, Lookup
from kvferry.errors import KVFerryError
from kvferry.layout import KeyContext

NOTHING = Lookup(0, 0)
_END_S = 10.0
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(slots=True, eq=False)
class Question:
    """What the server has of `tokens`: once it is `done`, `found`, or the `error` in its place."""

    name: str
    tokens: array[int]
    context: KeyContext
    done: threading.Event = field(default_factory=threading.Event)
    withdrawn: bool = False
    found: Lookup = NOTHING
    error: Exception | None = None


class Asker:
    """Does what it is given, one after the other, on one client.

    A thread of its own, `kvferry-asker`, talks to the server. It starts with the first task, and ends with `close`. All
    methods are for one other thread, and none of them waits, but for `close`.
    """

    def __init__(self, client: CacheClient, engine_id: str) -> None:
        self._client = client
        self._engine_id = engine_id
        self._attached = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a server."""
        return self._client.connected

    def ask(self, question: Question) -> None:
        """Have it answered."""
        self._give(functools.partial(self._answer, question))

    def withdraw(self, question: Question) -> None:
        """Nobody will use the answer: it is not asked for, or what it promises is given back."""
        question.withdrawn = True
        self._give(lambda: self._release(question.found.lease_id))

    def release(self, lease_id: int) -> None:
        """Give a promise back."""
        self._give(functools.partial(self._release, lease_id))

    def forget(self, name: str) -> None:
        """The request has ended."""
        if self._thread is not None:  # else nothing was ever asked for
            self._give(functools.partial(self._client.end_request, name))

    def close(self) -> None:
        """Hang up, and end the thread. Idempotent."""
        self._client.close()  # which fails what is being asked
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_END_S)

    def _give(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-asker", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        """The thread."""
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - the next task may go well
                _LOG.exception("a message to the cache server failed")

    def _answer(self, question: Question) -> None:
        try:
            if not question.withdrawn:
                if not self._attached:
                    self._client.attach(self._engine_id)
                    self._attached = True
                question.found = self._client.lookup(question.name, question.tokens, context=question.context)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler waits for an answer
            question.error = error
        finally:
            question.done.set()

    def _release(self, lease_id: int) -> None:
        if lease_id == 0:
            return
        try:
            self._client.release(lease_id)
        except KVFerryError as error:  # an overdue lease ends by itself
            _LOG.debug("a promise could not be given back: %s", error)
