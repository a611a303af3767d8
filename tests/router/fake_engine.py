"""A server that behaves as vLLM's does, or as it should not: in a process of its own, told what to do over HTTP.

It answers completions with words, streamed or at once, gives a request up when its client hangs up, and remembers each.
`POST /control` changes how it behaves from then on; `GET /control` shows what it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
import zmq


@dataclasses.dataclass
class Behaviour:
    """What happens to requests that come from now on.

    They wait while `hold` is set. `status` is answered instead of words; `error_code` is a stream's first event. Before
    its event `die_at` the process kills itself, before `hang_at` it says nothing more. `cut` sends half of an event
    before either, and the event with an error in two halves. Without `sends` it hands nothing over, as if it could not.
    """

    hold: bool = False
    status: int = 200
    error_code: int = 0
    events: int = 4
    die_at: int = -1
    hang_at: int = -1
    cut: bool = False
    sends: bool = True
    healthy: bool = True


@dataclasses.dataclass
class Beat:
    """Heartbeats to `address`, each of these maps in each, as MessagePack unless `raw`."""

    address: str
    maps: list[dict[str, Any]]
    period_s: float = 0.1
    raw: bool = False


class FakeEngine:
    """The ASGI application. Beside the loop's thread one sends heartbeats, until it is told others or none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour = Behaviour()
        self.seen: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._stop_beating = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        path = scope["path"]
        if path == "/control":
            await self._control(scope, receive, send)
        elif path == "/health":
            await _answer(send, 200 if self.behaviour.healthy else 503, {})
        elif path == "/v1/models":
            await _answer(send, 200, {"object": "list", "data": [{"id": self.name}], "authorized": _header(scope)})
        else:
            await self._complete(scope, receive, send)

    async def _control(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            orders = json.loads(await _body(receive))
            if "beat" in orders:
                self._beat(orders.pop("beat"))
            if orders.pop("forget", False):
                self.seen = [one for one in self.seen if one["state"] == "open"]
            self.behaviour = dataclasses.replace(self.behaviour, **orders)
            self._changed.set()
            self._changed = asyncio.Event()
        await _answer(send, 200, {"seen": self.seen})

    async def _complete(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or give up when the client leaves, whichever is first."""
        body = json.loads(await _body(receive))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        one = {"path": scope["path"], "body": body, "headers": headers, "state": "open"}
        self.seen.append(one)
        answering = asyncio.create_task(self._answer(body, send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        one["state"] = "done" if answering.done() else "aborted"
        for task in (answering, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering

    async def _answer(self, body: dict[str, Any], send: Any) -> None:
        told = self.behaviour
        if not body.get("stream"):
            await self._held()
            if told.die_at == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if told.hang_at == 0:
                await asyncio.Event().wait()
            if told.status != 200:
                await _answer(send, told.status, {"error": {"message": "as told", "code": told.status}})
                return
            answer: dict[str, Any] = {"engine": self.name, "text": words(body, told.events)}
            params = body.get("kv_transfer_params") or {}
            if params.get("do_remote_decode") and told.sends:
                answer["kv_transfer_params"] = {"transfer_id": params["transfer_id"], "do_remote_prefill": True}
            await _answer(send, 200, answer)
            return
        if told.status != 200:
            await self._held()
            await _answer(send, told.status, {"error": {"message": "as told", "code": told.status}})
            return
        await _start(send, 200, b"text/event-stream; charset=utf-8")  # vLLM begins before it has a token
        await self._held()
        await self._stream(body, told, send)

    async def _stream(self, body: dict[str, Any], told: Behaviour, send: Any) -> None:
        if told.error_code:
            event = _event({"error": {"message": "as told", "code": told.error_code}})
            if told.cut:
                await _more(send, event[:20])
                await asyncio.sleep(0.2)  # so that it comes by itself
                event = event[20:]
            await _more(send, event + b"data: [DONE]\n\n")
            await send({"type": "http.response.body", "body": b""})
            return
        for number in range(told.events):
            event = _event({"engine": self.name, "text": words(body, 1), "number": number})
            if number in (told.die_at, told.hang_at):
                if told.cut:
                    await _more(send, event[: len(event) // 2])
                    await asyncio.sleep(0.2)  # so that it is sent, whatever comes now
                if number == told.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                await asyncio.Event().wait()
            await _more(send, event)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _held(self) -> None:
        while self.behaviour.hold:
            await self._changed.wait()

    def _beat(self, told: dict[str, Any] | None) -> None:
        self._stop_beating.set()
        if told is not None:
            self._stop_beating = threading.Event()
            threading.Thread(target=beat, args=(Beat(**told), self._stop_beating), daemon=True).start()


def words(body: dict[str, Any], count: int) -> str:
    """What is answered to a prompt."""
    asked = body.get("prompt", body.get("messages"))
    return f"{asked}-" * count


def beat(told: Beat, stop: threading.Event) -> None:
    """Send heartbeats as engines do."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt_string(zmq.IDENTITY, f"{told.maps[0]['http_address']}")
        sock.connect(f"tcp://{told.address}")
        while True:
            for each in told.maps:
                sock.send(msgspec.json.encode(each) if told.raw else msgspec.msgpack.encode(each))
            if stop.wait(told.period_s):
                return


def serve(name: str, ready: Callable[[int], None], port: int = 0) -> None:
    """Answer until the process ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(512)
    ready(sock.getsockname()[1])
    config = uvicorn.Config(FakeEngine(name), lifespan="off", log_config=None, access_log=False)
    asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _header(scope: Any) -> str:
    return next((value.decode() for name, value in scope["headers"] if name == b"authorization"), "")


async def _body(receive: Any) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Callable[[Any], Awaitable[None]], status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _more(send: Callable[[Any], Awaitable[None]], data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
    await asyncio.sleep(0)


async def _answer(send: Callable[[Any], Awaitable[None]], status: int, value: object) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
