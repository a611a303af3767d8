"""Calls to engines: what becomes of one that is given up, or whose engine is lost, at any point."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.calls import CallFailedError, EngineCalls
from kvferry.router.connection import Outgoing
from kvferry.router.tasks import end_tasks

ASK = Outgoing("POST", "/v1/completions", [(b"authorization", b"x")], b"{}")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def engine(port: int) -> EngineAddress:
    return EngineAddress(EngineKey(Role.DECODE, f"127.0.0.1:{port}"))


async def with_server(handler: Handler, body: Callable[[EngineAddress], Awaitable[None]]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await asyncio.wait_for(body(engine(server.sockets[0].getsockname()[1])), 20)


def says(*parts: bytes) -> Handler:
    """Reads a request and answers with these bytes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        for part in parts:
            writer.write(part)
            await writer.drain()

    return handler


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until it hangs up


def test_an_answer_comes_as_it_is_sent() -> None:
    async def body(address: EngineAddress) -> None:
        with EngineCalls().call(address, ASK) as call:
            head = await call.head()
            assert (head.status, dict(head.headers)[b"x"]) == (200, b"Y")
            assert await call.body() == b"hello"

    chunked = b"HTTP/1.1 200 OK\r\nX: Y\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    asyncio.run(with_server(says(b"HTTP/1.1 100 Continue\r\n\r\n", chunked), body))
    asyncio.run(with_server(says(b"HTTP/1.1 200 OK\r\nX: Y\r\n\r\n", b"hello"), body))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
)
def test_an_answer_that_breaks_off_or_is_none_has_failed(answer: bytes) -> None:
    async def body(address: EngineAddress) -> None:
        with EngineCalls().call(address, ASK) as call:

            async def answer() -> bytes:
                await call.head()
                return await call.body()

            with pytest.raises(CallFailedError) as caught:
                await answer()
        assert not caught.value.unreachable
        assert caught.value.key == address.key

    asyncio.run(with_server(says(answer), body))


def test_nobody_at_the_address_is_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = engine(free.getsockname()[1])

    async def body() -> None:
        with EngineCalls().call(address, ASK) as call, pytest.raises(CallFailedError) as caught:
            await call.head()
        assert caught.value.unreachable

    asyncio.run(body())


def test_what_this_process_may_not_open_is_not_the_engines_fault() -> None:
    async def body(address: EngineAddress) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as last:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
        try:
            with EngineCalls().call(address, ASK) as call, pytest.raises(CallFailedError, match="open files") as caught:
                await call.head()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not caught.value.unreachable

    asyncio.run(with_server(silent, body))


def test_a_lost_engine_fails_its_calls_and_no_others() -> None:
    async def body(address: EngineAddress) -> None:
        calls = EngineCalls()
        other = EngineAddress(EngineKey(Role.PREFILL, address.key.http))
        with calls.call(address, ASK) as lost, calls.call(other, ASK) as kept:
            waiting = [asyncio.create_task(call.head()) for call in (lost, kept)]
            await asyncio.sleep(0.05)
            calls.lose(address.key, "it was silent")
            with pytest.raises(CallFailedError, match="it was silent"):
                await waiting[0]
            assert not waiting[1].done()
            await end_tasks(waiting)
        assert calls._going_on == {}

    asyncio.run(with_server(silent, body))


@pytest.mark.parametrize("ticks", range(12))
@pytest.mark.parametrize("lose", [True, False])
def test_a_call_ends_wherever_it_is(ticks: int, lose: bool) -> None:
    """Lost, or closed and cancelled, after so many turns of the loop: before, in and after the set-up."""

    async def body(address: EngineAddress) -> None:
        calls = EngineCalls()
        with calls.call(address, ASK) as call:
            waiting = asyncio.create_task(call.head())
            for _ in range(ticks):
                await asyncio.sleep(0)
            if lose:
                calls.lose(address.key, "it was silent")
                with pytest.raises(CallFailedError, match="it was silent"):
                    await asyncio.wait_for(waiting, 10)
            else:
                call.close()
                await asyncio.wait_for(end_tasks([waiting]), 10)

    asyncio.run(with_server(silent, body))


def test_a_task_that_misses_its_cancellation_is_told_again() -> None:
    async def body() -> None:
        missed = asyncio.Event()

        async def stubborn() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                missed.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await asyncio.wait_for(end_tasks([task]), 30)
        assert missed.is_set()
        assert task.cancelled()

    asyncio.run(body())


def test_a_call_that_is_over_has_no_connection() -> None:
    async def both() -> None:
        hung_up = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await silent(reader, writer)
            hung_up.set()

        async def body(address: EngineAddress) -> None:
            with EngineCalls().call(address, ASK) as call:
                waiting = asyncio.create_task(call.head())
                await asyncio.sleep(0.1)
            await asyncio.wait_for(hung_up.wait(), 10)  # while somebody still has the call
            assert call is not None
            await end_tasks([waiting])

        await with_server(handler, body)

    asyncio.run(both())
