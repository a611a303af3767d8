"""Jobs: stores and retrieves that the server works on while the engine goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np

from kvferry.client.waiting import Answer
from kvferry.errors import DeadlineError, KVFerryError, ProtocolError, RequestError, ServerGoneError
from kvferry.protocol.messages import Error, Retrieved, Stored


class StoreResult(msgspec.Struct, frozen=True):
    """What became of a store's whole chunks: written now, there already, skipped because the server has no room."""

    num_stored: int
    num_present: int
    num_skipped: int


class RetrieveResult(msgspec.Struct, frozen=True):
    """All bytes of so many chunks are in the blocks."""

    num_chunks: int


_T = TypeVar("_T", StoreResult, RetrieveResult)


class Job(Generic[_T]):
    """One store or retrieve. Thread-safe.

    Once it is done the server neither reads nor writes its blocks any more, whether it went well or not.
    """

    def __init__(self, block_ids: Sequence[int], expected: type[Stored] | type[Retrieved], *, stages: int = 1) -> None:
        self.stages = stages
        self._stages_done = 0  # those before the last that the server has told of
        self._block_ids = tuple(block_ids)
        self._expected = expected
        self._ask_to_stop: Callable[[], None] | None = None
        self._done = threading.Event()
        self._changed = threading.Condition()  # guards what is here; one answer ends it
        self._result: _T | None = None
        self._error: KVFerryError | None = None
        self._failed: tuple[int, ...] = ()

    def __repr__(self) -> str:
        state = "going on" if not self.done() else f"failed: {self._error}" if self._error else "done"
        return f"<Job over {len(self._block_ids)} blocks, {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed; None while it is going on, and where it went well."""
        return self._error

    @property
    def failed_block_ids(self) -> tuple[int, ...]:
        """The blocks that a failed retrieve has not filled; what they hold must not be used."""
        return self._failed

    def wait(self, timeout_s: float = 60.0) -> _T:
        """Block until it has ended; its result.

        Raises its `error` where it failed. Raises DeadlineError where it is still going on after `timeout_s`: it is not
        stopped then, and bytes may still move; `cancel` stops it.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineError(f"the job is still going on after {timeout_s:g} s; cancel() stops it")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def wait_stages(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until the first `count` of a retrieve's `stages` are in place; the last is with the job's end.

        Of P planes, in the order in which the tensors were registered, stage `i` are those from `i * P // stages` up to
        `(i + 1) * P // stages`, in all blocks. A server that does not tell of stages has them all in place at the end.

        Raises what `wait` raises. Where it failed, what is in place is told by `failed_block_ids` alone.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done() or self._stages_done >= count, timeout_s):
                raise DeadlineError(f"stage {count} of {self.stages} is not in place after {timeout_s:g} s")
            if self._error is not None:
                raise self._error

    def cancel(self, timeout_s: float = 10.0) -> bool:
        """Stop it, and block until no byte can move any more. True where it was stopped, False where it had ended well.

        Raises DeadlineError where that is not known after `timeout_s`; its blocks must not be used until `done()`.
        """
        if not self.done() and self._ask_to_stop is not None:
            with contextlib.suppress(ServerGoneError):  # the job then ends with that
                self._ask_to_stop()
        if not self._done.wait(timeout_s):
            raise DeadlineError(f"the server has not confirmed within {timeout_s:g} s that the job is stopped")
        return self._error is not None

    def bind(self, ask_to_stop: Callable[[], None]) -> None:
        """What tells the server to stop it."""
        self._ask_to_stop = ask_to_stop

    def end(self, answer: Answer) -> None:
        """The server's answer, or why there is none; only the first counts."""
        with self._changed:
            if self._done.is_set():
                return
            if isinstance(answer, self._expected) and min(_numbers(answer)) >= 0:
                kind = StoreResult if isinstance(answer, Stored) else RetrieveResult
                self._result = kind(*_numbers(answer))  # type: ignore[assignment]
            else:
                self._error, self._failed = self._failure(answer)
            self._done.set()
            self._changed.notify_all()

    def advance(self, num_done: int) -> None:
        """The server says that so many stages are in place. Fewer than before, or all of them, are no news."""
        with self._changed:
            if self._stages_done < num_done < self.stages:
                self._stages_done = num_done
                self._changed.notify_all()

    def _failure(self, answer: Answer) -> tuple[KVFerryError, tuple[int, ...]]:
        """Why it failed, and for which blocks: for all of them where the answer does not make sense."""
        if isinstance(answer, KVFerryError):
            return answer, self._block_ids
        if not isinstance(answer, Error):
            return ProtocolError(f"the server answered a job with {answer!r:.200}"), self._block_ids
        data = answer.failed_blocks
        failed = tuple(np.frombuffer(data, dtype="<i4").tolist()) if len(data) % 4 == 0 else None
        if failed is None or not set(failed) <= set(self._block_ids):
            text = f"the server failed a job ({answer.text} [{answer.code}]), but for what are not blocks of it"
            return ProtocolError(text), self._block_ids
        return RequestError(answer.code, answer.text), failed or self._block_ids


def _numbers(answer: Stored | Retrieved) -> tuple[int, ...]:
    if isinstance(answer, Stored):
        return answer.num_stored, answer.num_present, answer.num_skipped
    return (answer.num_chunks,)
