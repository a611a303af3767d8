"""One try of a request: a decode engine, and in most a prefill engine, both asked at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from kvferry.router.addresses import EngineAddress
from kvferry.router.balance import Balance
from kvferry.router.calls import Call, CallFailedError, EngineCalls
from kvferry.router.connection import Head, Outgoing
from kvferry.router.course import Pair
from kvferry.router.handover import Handover, plan_handover, was_sent
from kvferry.router.headers import Headers, engine_headers
from kvferry.router.registry import Engine
from kvferry.router.replies import error_in_event, has_event
from kvferry.router.requests import Ask, decode_body, prefill_body
from kvferry.router.tasks import end_tasks

__all__ = ["Answer", "Attempt", "PrefillRefusedError", "Request"]

_LOG = logging.getLogger(__name__)


class PrefillRefusedError(Exception):
    """A prefill engine takes the request for wrong, of which a decode engine has the last word, or sends no KV."""


@dataclass(frozen=True)
class Request:
    """A client's request, ready to be sent to engines."""

    path: str
    headers: Headers
    request_id: str
    ask: Ask


@dataclass(frozen=True)
class Answer:
    """How a decode engine's answer begins; of one that is no stream, or short, `begin` is all and `more` is None."""

    head: Head
    begin: bytes
    more: Call | None


class Attempt:
    """Asks both engines when entered, and gives both up when left. For one task of the event loop."""

    def __init__(self, calls: EngineCalls, balance: Balance, request: Request, pair: Pair) -> None:
        self._calls = calls
        self._balance = balance
        self._request = request
        self._pair = pair
        self._stack = contextlib.ExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()
        await end_tasks(self._tasks)

    async def answer(self) -> Answer:
        """Ask, and wait for the answer's beginning.

        Raises CallFailedError, which says of which engine, where one of the two has failed before that, and
        PrefillRefusedError.
        """
        ask, pair = self._request.ask, self._pair
        handover = None
        if pair.prefill is not None:
            handover = plan_handover(pair.prefill.address, pair.decode.address, self._request.request_id)
        request_id = self._request.request_id if handover is None else handover.request_id
        self._stack.callback(self._balance.begin_decode(pair.decode).end)
        decode = self._call(pair.decode.address, request_id, decode_body(ask, handover))
        first = self._task(self._first(decode))
        waiting: set[asyncio.Task[Any]] = {first}
        if pair.prefill is not None and handover is not None:
            work = self._balance.begin_prefill(pair.prefill, ask.prefix, pair.seen_bytes)
            self._stack.callback(work.end)
            prefill = self._call(pair.prefill.address, request_id, prefill_body(ask, handover))
            reading = self._task(self._read_prompt(pair.prefill, prefill, handover))
            reading.add_done_callback(lambda _: work.end())
            waiting.add(reading)
        while not first.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                for task in done:
                    task.result()
        answer: Answer = await first
        return answer

    def _call(self, address: EngineAddress, request_id: str, body: bytes) -> Call:
        headers = engine_headers(self._request.headers, address, request_id)
        outgoing = Outgoing("POST", self._request.path, headers, body)
        return self._stack.enter_context(self._calls.call(address, outgoing))

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _read_prompt(self, prefill: Engine, call: Call, handover: Handover) -> None:
        """Return when the prefill engine has done its part."""
        head = await call.head()
        body = await call.body()
        text = f"it answered {head.status}: {body[:300].decode(errors='replace')}"
        if head.status < 400:
            if was_sent(handover, body):
                return
            text = "it has answered, and hands over no KV: its log says why"  # for which the decode engine would wait
        if head.status < 500:
            _LOG.warning("%s: %s", prefill.key, text, extra={"request": self._request.request_id})
            raise PrefillRefusedError(text)
        raise CallFailedError(prefill.key, text)

    async def _first(self, call: Call) -> Answer:
        head = await call.head()
        is_stream = head.status < 400 and any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers
        )
        if not is_stream:
            answer = Answer(head, await call.body(), None)
            status = head.status
        else:
            begin, ended = await _first_event(call)
            answer = Answer(head, begin, None if ended else call)
            status = error_in_event(begin) or head.status
        if status >= 500:
            text = f"it answered {status}: {answer.begin[:300].decode(errors='replace')}"
            raise CallFailedError(self._pair.decode.key, text)
        return answer


async def _first_event(call: Call) -> tuple[bytes, bool]:
    """What a stream begins with, up to where an event is whole, and whether that is all of it."""
    begin = b""
    while not has_event(begin):
        more = await call.chunk()
        if more is None:
            return begin, True
        begin += more
    return begin, False
