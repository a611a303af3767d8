"""Requests to engines over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import NamedTuple

import httpx

from kvferry.router.addresses import EngineAddress, EngineKey
from kvferry.router.headers import Headers

__all__ = ["Call", "CallFailedError", "EngineCalls", "Head"]

CONNECT_S = 5.0
WRITE_S = 30.0
# Servers close a connection that was idle for 5 s or more: what is older is not used again, so as not to meet that.
KEEP_IDLE_S = 2.0
MAX_ANSWER_BYTES = 256 << 20
_MAX_CHUNKS = 16
_CLOSE_S = 5.0


class CallFailedError(Exception):
    """An engine did not answer to the end; `unreachable`: nobody was at its address. `status`: it said so itself."""

    def __init__(self, key: EngineKey, text: str, *, unreachable: bool = False, status: int | None = None) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.unreachable = unreachable
        self.status = status


class Head(NamedTuple):
    """What an answer begins with."""

    status: int
    headers: Headers


class Call:
    """One request to an engine, and its answer as it comes.

    A task of its own asks and reads, a few chunks ahead at most. `close` ends it, and with it the connection, whereupon
    the engine gives the request up. All in the event loop's thread.
    """

    def __init__(self, key: EngineKey, ask: Callable[[], Awaitable[httpx.Response]]) -> None:
        """`ask` sends the request and gives the answer once its head is there."""
        self.key = key
        self._ask = ask
        self._items: asyncio.Queue[Head | bytes | CallFailedError | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(_MAX_CHUNKS)
        self._failure: CallFailedError | None = None
        self._ended = False
        self._task = asyncio.create_task(self._run())

    async def head(self) -> Head:
        """The status and headers; the first thing to ask for. Raises CallFailedError."""
        item = await self._next()
        assert isinstance(item, Head)
        return item

    async def chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises CallFailedError."""
        item = await self._next()
        assert not isinstance(item, Head)
        return item

    async def body(self) -> bytes:
        """The whole of it. Raises CallFailedError."""
        parts, size = [], 0
        while (part := await self.chunk()) is not None:
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise CallFailedError(self.key, f"it answered more than {MAX_ANSWER_BYTES >> 20} MiB at once")
        return b"".join(parts)

    def fail(self, text: str) -> None:
        """End it as if the engine had failed: after what has come already, its reader is told so."""
        if not self._task.done() and self._failure is None:
            self._failure = CallFailedError(self.key, text)
            self._task.cancel()

    async def close(self) -> None:
        """Idempotent."""
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_S)

    async def _next(self) -> Head | bytes | None:
        if self._ended:
            return None
        item = await self._items.get()
        self._ended = item is None or isinstance(item, CallFailedError)
        if isinstance(item, CallFailedError):
            raise item
        self._room.release()
        return item

    async def _run(self) -> None:
        last: CallFailedError | None = CallFailedError(self.key, "the call was given up")
        try:
            await self._read()
            last = None
        except asyncio.CancelledError:
            last = self._failure or last
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            last = CallFailedError(self.key, f"it cannot be reached: {error or 'no answer'}", unreachable=True)
        except (httpx.HTTPError, httpx.StreamError) as error:
            last = CallFailedError(self.key, f"the connection broke: {error or type(error).__name__}")
        finally:
            self._items.put_nowait(last)

    async def _read(self) -> None:
        response = await self._ask()
        try:
            await self._put(Head(response.status_code, [(name.lower(), value) for name, value in response.headers.raw]))
            async for data in response.aiter_raw():
                if data:
                    await self._put(data)
        finally:
            await response.aclose()

    async def _put(self, item: Head | bytes) -> None:
        await self._room.acquire()
        self._items.put_nowait(item)


class EngineCalls:
    """All calls that go on, by engine. In the event loop's thread; close it there."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_IDLE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S, write=WRITE_S)
        # No proxies of the environment: engines are asked where they say they are.
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, follow_redirects=False)
        self._going_on: dict[EngineKey, set[Call]] = {}

    async def __aenter__(self) -> EngineCalls:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def call(
        self, address: EngineAddress, path: str, headers: Headers, *, method: str = "POST", body: bytes = b""
    ) -> AsyncIterator[Call]:
        """A call that has begun, and ends with the body of `async with`."""

        async def ask() -> httpx.Response:
            request = self._client.build_request(method, address.url + path, headers=headers, content=body)
            return await self._client.send(request, stream=True)

        call = Call(address.key, ask)
        going_on = self._going_on.setdefault(address.key, set())
        going_on.add(call)
        try:
            yield call
        finally:
            going_on.discard(call)
            if not going_on and self._going_on.get(address.key) is going_on:
                del self._going_on[address.key]
            await call.close()

    def lose(self, key: EngineKey, text: str) -> None:
        """Fail all calls to an engine that was lost."""
        for call in list(self._going_on.get(key, ())):
            call.fail(text)
