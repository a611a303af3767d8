"""A client's side of a request, in ASGI's terms."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send

from kvferry.router.headers import Headers, answer_headers
from kvferry.router.replies import error_body, error_event

__all__ = ["BodyTooLargeError", "ClientLeftError", "ReplyWriter", "read_body", "wait_until_left"]

_LAST_WORD_S = 5.0


class ClientLeftError(Exception):
    """The client hung up."""


class BodyTooLargeError(Exception):
    """The request has more bytes than are taken."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError, as soon as that is known, and ClientLeftError."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise BodyTooLargeError
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise BodyTooLargeError
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_until_left(receive: Receive) -> None:
    """Return when the client has hung up. For after its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ReplyWriter:
    """Writes one answer. For one task at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.ended = False
        self._is_stream = False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """An answer that is there."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*answer_headers(headers), length])
        await self.end(body)

    async def error(self, status: int, text: str, *, code: str, param: str | None = None) -> None:
        """An error object; `code` is a word that programs can go by."""
        headers = [(b"content-type", b"application/json")]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await self.whole(status, headers, error_body(status, text, code=code, param=param))

    async def stream(self, status: int, headers: Headers) -> None:
        """Begin an answer that goes on with `more`."""
        self._is_stream = True
        await self._start(status, answer_headers(headers))

    async def more(self, data: bytes) -> None:
        """Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last bytes."""
        await self._send({"type": "http.response.body", "body": data})
        self.ended = True

    async def break_off(self, status: int, text: str, *, code: str) -> None:
        """Say why there is no answer, or no more of it; not for ever to a client that does not read."""
        with contextlib.suppress(asyncio.TimeoutError):
            if not self.begun:
                await asyncio.wait_for(self.error(status, text, code=code), _LAST_WORD_S)
            elif self._is_stream:
                await asyncio.wait_for(self.end(error_event(status, text, code=code)), _LAST_WORD_S)

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
