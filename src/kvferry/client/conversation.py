"""One request, and the replies to it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from kvferry.client.waiting import Answer
from kvferry.errors import DeadlineError, KVFerryError, ProtocolError, RequestError
from kvferry.protocol.messages import Error, Message

_R = TypeVar("_R", bound=Message)


class Conversation:
    """The replies to one seq, in order. Made by `Link.conversation`.

    `read_for(answers, deadline)` may read the socket in the caller's thread until an answer is there.
    """

    def __init__(self, seq: int, read_for: Callable[[queue.SimpleQueue[Answer], float], None]) -> None:
        self.seq = seq
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._read_for = read_for

    def receive(self, kind: type[_R], timeout_s: float) -> _R:
        """The next reply.

        Raises RequestError where the server refused, ServerGoneError where it went away, DeadlineError, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        self._read_for(self.answers, deadline)
        try:
            answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DeadlineError(f"the server did not answer within {timeout_s:g} s") from None
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Error):
            raise RequestError(answer.code, answer.text)
        if isinstance(answer, KVFerryError):
            raise answer
        raise ProtocolError(f"the server answered {type(answer).__name__}, expected {kind.__name__}")
