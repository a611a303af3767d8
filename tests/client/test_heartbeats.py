"""Link: heartbeats, for peers whose death no kernel tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from doubles.scripted_server import ScriptedServer
from kvferry.client.link import Link
from kvferry.errors import DeadlineError, ServerGoneError
from kvferry.protocol.address import UnixAddress
from kvferry.protocol.messages import Message, Ping, Pong, Request, Stats, StatsReply
from serving.process import eventually

BEAT_S = 0.3


def test_an_idle_link_lives_on_while_the_server_answers(tmp_path: Path) -> None:
    def answer(request: Request) -> Sequence[Message]:
        return [Pong(request.seq)] if isinstance(request, Ping) else []

    server = ScriptedServer(tmp_path / "s", answer, heartbeat_s=BEAT_S)
    link = Link(UnixAddress(str(tmp_path / "s")), 5)
    eventually(lambda: len(server.requests) >= 8)
    assert link.usable
    assert all(isinstance(request, Ping) for request in server.requests)
    assert link.close()
    server.close()


def test_a_caller_that_waits_for_long_keeps_nothing_from_beating(tmp_path: Path) -> None:
    may_answer = threading.Event()
    asked: list[int] = []

    def answer(request: Request) -> Sequence[Message]:
        if isinstance(request, Stats):
            asked.append(request.seq)
        if not isinstance(request, Ping):
            return []
        late = [StatsReply(asked.pop(), {})] if may_answer.is_set() and asked else []
        return [*late, Pong(request.seq)]

    server = ScriptedServer(tmp_path / "s", answer, heartbeat_s=BEAT_S)
    link = Link(UnixAddress(str(tmp_path / "s")), 5)
    replies: list[StatsReply] = []
    thread = threading.Thread(target=lambda: replies.append(link.call(Stats, StatsReply, 20)))
    thread.start()
    eventually(lambda: sum(isinstance(request, Ping) for request in server.requests) >= 8)
    assert link.usable
    may_answer.set()
    thread.join(10)
    assert len(replies) == 1
    assert link.close()
    server.close()


@pytest.mark.parametrize("waits", [False, True])
def test_silence_ends_a_link(tmp_path: Path, waits: bool) -> None:
    server = ScriptedServer(tmp_path / "s", lambda request: [], heartbeat_s=BEAT_S)
    ended: list[Link] = []
    link = Link(UnixAddress(str(tmp_path / "s")), 5, on_end=ended.append)
    started = time.monotonic()
    if waits:
        with pytest.raises(ServerGoneError, match=r"nothing was heard of the server for 0\.9 s"):
            link.call(Stats, StatsReply, 20)
    eventually(lambda: ended == [link])
    assert time.monotonic() - started >= 3 * BEAT_S
    assert not link.usable
    server.close()


def test_without_heartbeats_silence_is_no_sign(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "s", lambda request: [])
    link = Link(UnixAddress(str(tmp_path / "s")), 5)
    with pytest.raises(DeadlineError):
        link.call(Stats, StatsReply, 0.5)
    assert link.usable
    assert len(server.requests) == 1
    assert link.close(0.0) is False or link.ended
    server.close()
