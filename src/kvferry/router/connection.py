"""One request over one connection of its own, by HTTP/1.1.

No connection is used twice: what is kept open may be closed by the other side in the moment of its next use, and of a
pool one would have to know which request lost which connection. Setting one up takes less than a millisecond, a prompt
takes many.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import h11

from kvferry.router.headers import Headers
from kvferry.settings import split_host_port

__all__ = ["Connection", "Head", "Outgoing"]

CONNECT_S = 5.0
WRITE_S = 30.0
_READ_BYTES = 1 << 16


class Head(NamedTuple):
    """What an answer begins with; names of headers are in lower case."""

    status: int
    headers: Headers


class Outgoing(NamedTuple):
    """A request, without what belongs to its connection."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""


class Connection:
    """For one task, but for `abort`. Errors are OSError, TimeoutError and h11.ProtocolError."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._aborted = False

    async def open(self, address: str) -> None:
        """Connect, within 5 s. Raises OSError, or TimeoutError."""
        host, port = split_host_port(address)
        streams = await asyncio.wait_for(asyncio.open_connection(host, port, limit=_READ_BYTES), CONNECT_S)
        self._reader, self._writer = streams
        if self._aborted:
            self.abort()
            raise ConnectionAbortedError("the call was given up")

    async def ask(self, address: str, request: Outgoing) -> Head:
        """Send a request, and wait for the head of its answer."""
        assert self._writer is not None
        headers = [(b"host", address.encode()), (b"connection", b"close"), *request.headers]
        if request.body:
            headers.append((b"content-length", b"%d" % len(request.body)))
        events = [h11.Request(method=request.method, target=request.path, headers=headers), h11.EndOfMessage()]
        if request.body:
            events.insert(1, h11.Data(data=request.body))
        for event in events:
            self._writer.write(self._http.send(event) or b"")
        await asyncio.wait_for(self._writer.drain(), WRITE_S)
        while True:
            answer = await self._event()
            if isinstance(answer, h11.Response):
                return Head(answer.status_code, list(answer.headers))
            if not isinstance(answer, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no answer came")

    async def chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end."""
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return None
        raise h11.RemoteProtocolError("the answer broke off")

    def abort(self) -> None:
        """Close it at once, also from another task; whoever waits for it gets an error. Idempotent."""
        self._aborted = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def _event(self) -> object:
        assert self._reader is not None
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event
