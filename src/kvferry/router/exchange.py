"""One client's request for completions, from its body to the answer's last byte."""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import Any

from starlette.types import Receive, Scope, Send

from kvferry.router.addresses import EngineKey
from kvferry.router.attempt import Answer, Attempt, PrefillRefusedError, Request
from kvferry.router.calls import CallFailedError
from kvferry.router.course import Alone, Course
from kvferry.router.front import Front
from kvferry.router.headers import clean_request_id
from kvferry.router.replies import EventCutter
from kvferry.router.requests import BadRequestError, read_ask
from kvferry.router.tasks import end_tasks
from kvferry.router.writer import BodyTooLargeError, ClientLeftError, ReplyWriter, read_body, wait_until_left

__all__ = ["Exchange"]

_LOG = logging.getLogger(__name__)

BODY_S = 60.0
_LAST_STEPS_S = 5.0
CHAT_PATH = "/v1/chat/completions"


class Outcome(str, enum.Enum):
    """How a request ended, as the measure `requests` says it."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    BROKEN_OFF = "broken_off"
    TIMED_OUT = "timed_out"
    CLIENT_LEFT = "client_left"


class Exchange:
    """Answers one request. It ends with its answer, its deadline, the client's or the router's, whichever is first."""

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self._front = front
        self._scope = scope
        self._receive = receive
        self._writer = ReplyWriter(send)
        self._loop = asyncio.get_running_loop()
        self._came_at = self._loop.time()

    async def run(self) -> None:
        """Answer, and count."""
        front = self._front
        front.num_requests += 1
        front.measures.set("requests_going_on", front.num_requests)
        outcome = Outcome.FAILED
        try:
            if front.num_requests > front.config.max_requests:
                await self._writer.error(503, "the router has as many requests as it takes", code="overloaded")
            else:
                outcome = await self._in_time()
        except asyncio.CancelledError:
            outcome = Outcome.BROKEN_OFF
            raise
        finally:
            front.num_requests -= 1
            front.measures.set("requests_going_on", front.num_requests)
            front.measures.count("requests", outcome.value)
            front.measures.observe("request_seconds", self._loop.time() - self._came_at)

    async def _in_time(self) -> Outcome:
        """Read the request and answer it; whatever ends that early ends the calls to engines with it."""
        request = await self._read()
        if isinstance(request, Outcome):
            return request
        limit_s = self._front.config.request_timeout_s
        answering = asyncio.create_task(self._answer(request))
        leaving = asyncio.create_task(wait_until_left(self._receive))
        ends: set[asyncio.Future[Any]] = {answering, leaving, self._front.ended}
        try:
            await asyncio.wait(
                ends,
                timeout=max(0.0, self._came_at + limit_s - self._loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._writer.ended:  # a client may leave as soon as it has its answer
                await asyncio.wait({answering}, timeout=_LAST_STEPS_S)
        finally:
            ended = answering.done()
            await end_tasks((answering, leaving))
        if ended:
            return answering.result()
        return await self._stop_early(request, left=leaving.done() and not leaving.cancelled())

    async def _stop_early(self, request: Request, *, left: bool) -> Outcome:
        if left:
            _LOG.debug("request %s: the client left", request.request_id)
            return Outcome.CLIENT_LEFT
        if self._front.ended.done():
            await self._writer.break_off(503, "the router is stopping", code="router_stopping")
            return Outcome.BROKEN_OFF
        limit_s = self._front.config.request_timeout_s
        _LOG.warning("request %s was not answered within %g s", request.request_id, limit_s)
        await self._writer.break_off(504, f"no answer within {limit_s:g} s (request-timeout)", code="request_timeout")
        return Outcome.TIMED_OUT

    async def _read(self) -> Request | Outcome:
        """The client's request, or how it ended already."""
        limit_bytes, path = self._front.config.max_body_bytes, self._scope["path"]
        limit_s = min(BODY_S, self._front.config.request_timeout_s)
        headers = list(self._scope["headers"])
        if any(name == b"via" and self._front.via in value for name, value in headers):
            await self._writer.error(
                508, "this is the router that asks: an engine has said its own address wrongly", code="loop"
            )
            return Outcome.REFUSED
        try:
            body = await asyncio.wait_for(read_body(self._scope, self._receive, limit_bytes), limit_s)
            ask = read_ask(body, is_chat=path == CHAT_PATH)
        except ClientLeftError:
            return Outcome.CLIENT_LEFT
        except asyncio.TimeoutError:
            await self._writer.break_off(408, f"the request did not come within {limit_s:g} s", code="slow_request")
        except BodyTooLargeError:
            text = f"the request has more than {limit_bytes} bytes (max-body)"
            await self._writer.error(413, text, code="body_too_large")
        except BadRequestError as error:
            await self._writer.error(400, str(error), code="invalid_request", param=error.param)
        else:
            return Request(path, [*headers, (b"via", self._front.via)], clean_request_id(headers), ask)
        return Outcome.REFUSED

    async def _answer(self, request: Request) -> Outcome:
        """Try until there is an answer, or nobody is left who might give one."""
        front, ask = self._front, request.ask
        course = Course(front.engines.balance, ask.prefix, alone=Alone.PROMPT_WANTED if ask.wants_prompt else None)
        while (pair := front.engines.choose(course)) is not None:
            if pair.alone is not None:
                front.measures.count("alone", pair.alone.value)
            if pair.prefill is not None:
                front.measures.count("prompt_bytes", by=ask.prefix.num_bytes)
                front.measures.count("prompt_bytes_seen", by=pair.seen_bytes)
            try:
                async with Attempt(front.calls, front.engines.balance, request, pair) as attempt:
                    return await self._pass_on(await attempt.answer(), pair.decode.key, request)
            except PrefillRefusedError:
                course.refused()
            except CallFailedError as error:
                again = course.failed(error.key)
                self._failed(error, request, again=again)
                if not again:
                    await self._writer.error(502, f"no engine answered; the last: {error}", code="engine_failed")
                    return Outcome.FAILED
        await self._writer.error(503, "there is no decode engine at present", code="no_engine")
        return Outcome.FAILED

    def _failed(self, error: CallFailedError, request: Request, *, again: bool) -> None:
        _LOG.warning("%s; %s", error, "tried again" if again else "given up", extra={"request": request.request_id})
        if error.unreachable:
            self._front.engines.unreachable(error.key)
        if again:
            self._front.measures.count("retries", error.key.role.name.lower())

    async def _pass_on(self, answer: Answer, key: EngineKey, request: Request) -> Outcome:
        """Write an answer as it comes; from here on nothing is tried again."""
        status, headers = answer.head
        self._front.measures.observe("first_byte_seconds", self._loop.time() - self._came_at)
        if answer.more is None:
            await self._writer.whole(status, headers, answer.begin)
            return Outcome.ANSWERED if status < 400 else Outcome.REFUSED
        cutter, data = EventCutter(), answer.begin
        await self._writer.stream(status, headers)
        try:
            while True:
                whole = cutter.feed(data)
                if whole:
                    await self._writer.more(whole)
                more = await answer.more.chunk()
                if more is None:
                    break
                data = more
        except CallFailedError as error:
            _LOG.warning("%s in mid-stream", error, extra={"request": request.request_id})
            await self._writer.break_off(502, f"the answer broke off: {error}", code="engine_failed")
            return Outcome.BROKEN_OFF
        await self._writer.end(cutter.rest())
        return Outcome.ANSWERED
