"""The loop's time is shared: frames that come in floods, or that nobody foresaw, are their own session's matter."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest

from kvferry.protocol.framing import Frame, encode_frame
from kvferry.protocol.messages import Hello, Message, Ping, Request
from kvferry.server.net import connection as connection_module
from kvferry.server.net.connection import Connection
from kvferry.server.net.loop import Loop
from serving.process import Stage
from serving.raw import Raw


class Ends:
    """A loop that is run round by round, and connections on it."""

    def __init__(self) -> None:
        self.loop: Loop[object] = Loop(lambda item: None, lambda now: 0.0)
        self.order: list[str] = []
        self.ended: dict[str, str] = {}
        self.connections: list[Connection] = []

    def connect(self, name: str, on_frame: Callable[[Frame[Request]], None] | None = None) -> socket.socket:
        ours, theirs = socket.socketpair()
        connection = Connection(
            ours,
            self.loop,
            on_frame=on_frame or (lambda frame: self.order.append(name)),
            on_end=lambda text, gone: self.ended.__setitem__(name, text),
        )
        connection.lift_limit()
        self.connections.append(connection)
        return theirs

    def rounds(self, count: int) -> None:
        left = [count]

        def on_tick(now: float) -> float:
            left[0] -= 1
            if left[0] <= 0:
                self.loop.stop()
            return 0.0

        self.loop._on_tick = on_tick
        self.loop._stopping.clear()
        self.loop.run()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.loop.close()


def frames(message: Message, count: int) -> bytes:
    return encode_frame(message) * count


def test_a_flood_lets_others_have_their_turn_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "TURN_S", 0.0)
    ends = Ends()
    with ends.connect("flood") as flood, ends.connect("other") as other:
        flood.sendall(frames(Ping(1), 300))
        other.sendall(frames(Ping(1), 1))
        ends.rounds(3)
        assert "other" in ends.order[:3]
        ends.rounds(400)
        assert ends.order.count("flood") == 300
        flood.sendall(frames(Ping(1), 1))
        ends.rounds(3)
        assert ends.order.count("flood") == 301
    ends.rounds(3)
    assert set(ends.ended) == {"flood", "other"}
    ends.close()


def test_a_frame_that_breaks_its_handler_ends_only_its_session() -> None:
    ends = Ends()

    def fail(frame: Frame[Request]) -> None:
        raise KeyError("unforeseen")

    with ends.connect("broken", fail) as broken, ends.connect("other") as other:
        broken.sendall(frames(Ping(1), 2))
        ends.rounds(3)
        other.sendall(frames(Ping(1), 1))
        ends.rounds(3)
        assert ends.ended == {"broken": "the server failed: KeyError"}
        assert ends.order == ["other"]
    ends.close()


def test_frames_that_are_nested_without_end_are_refused(stage: Stage) -> None:
    nested = b"\x91" * 4000 + b"\x90"
    body = b"\x84" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("hello")
    body += msgspec.msgpack.encode("version") + b"\x01" + msgspec.msgpack.encode("oldest") + b"\x01"
    body += msgspec.msgpack.encode("unknown") + nested
    raw = Raw(stage.path)
    raw.socket.sendall(len(body).to_bytes(4, "little") + body)
    assert "does not decode" in str(raw.until_end())
    raw.close()
    other = Raw(stage.path, Hello(1, 1), Ping(7))
    other.reply()
    assert other.reply().seq == 7  # type: ignore[union-attr]
    other.close()
