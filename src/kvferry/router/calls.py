"""Requests to engines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import h11

from kvferry.router.addresses import EngineAddress, EngineKey
from kvferry.router.connection import Connection, Head, Outgoing

__all__ = ["Call", "CallFailedError", "EngineCalls"]

Result = TypeVar("Result")

MAX_ANSWER_BYTES = 256 << 20
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # which say nothing of the engine


class CallFailedError(Exception):
    """An engine did not answer to the end; `unreachable`: nobody was at its address."""

    def __init__(self, key: EngineKey, text: str, *, unreachable: bool = False) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.unreachable = unreachable


class Call:
    """One request to an engine, and its answer as it comes. For one task, but for `fail` and `close`."""

    def __init__(self, address: EngineAddress, request: Outgoing) -> None:
        self._address = address
        self._request = request
        self._connection = Connection()
        self._failure: str | None = None

    async def head(self) -> Head:
        """Ask; the status and headers. Raises CallFailedError."""
        http = self._address.key.http
        try:
            await self._connection.open(http)
        except (OSError, asyncio.TimeoutError) as error:
            text = self._failure or f"it cannot be reached: {error or 'no answer'}"
            ours = self._failure is not None or getattr(error, "errno", None) in _OWN_LIMITS
            raise CallFailedError(self._address.key, text, unreachable=not ours) from None
        return await self._or_failed(self._connection.ask(http, self._request))

    async def chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises CallFailedError."""
        return await self._or_failed(self._connection.chunk())

    async def body(self) -> bytes:
        """The whole of it. Raises CallFailedError."""
        parts, size = [], 0
        while (part := await self.chunk()) is not None:
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                text = f"it answered more than {MAX_ANSWER_BYTES >> 20} MiB at once"
                raise CallFailedError(self._address.key, text)
        return b"".join(parts)

    def fail(self, text: str) -> None:
        """End it as if the engine had failed: whoever waits for its answer is told so."""
        self._failure = self._failure or text
        self._connection.abort()

    def close(self) -> None:
        """Close its connection, whereupon the engine gives the request up. Idempotent."""
        self._connection.abort()

    async def _or_failed(self, step: Awaitable[Result]) -> Result:
        try:
            return await step
        except (OSError, asyncio.TimeoutError, h11.ProtocolError) as error:
            text = self._failure or f"the connection broke: {error or type(error).__name__}"
            raise CallFailedError(self._address.key, text) from None


class EngineCalls:
    """All calls that go on, by engine. In the event loop's thread."""

    def __init__(self) -> None:
        self._going_on: dict[EngineKey, set[Call]] = {}

    @contextlib.contextmanager
    def call(self, address: EngineAddress, request: Outgoing) -> Iterator[Call]:
        """A call, to begin with its `head`, which ends with the body of `with`."""
        call = Call(address, request)
        going_on = self._going_on.setdefault(address.key, set())
        going_on.add(call)
        try:
            yield call
        finally:
            call.close()
            going_on.discard(call)
            if not going_on and self._going_on.get(address.key) is going_on:
                del self._going_on[address.key]

    def lose(self, key: EngineKey, text: str) -> None:
        """Fail all calls to an engine that was lost."""
        for call in list(self._going_on.get(key, ())):
            call.fail(text)
