"""The loop's inbox, from other threads and after the end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvferry.errors import ServerGoneError
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.net import loop as loop_module
from kvferry.server.net.loop import READ, Loop


def test_what_is_posted_to_a_closed_loop_goes_into_no_file(tmp_path: Path) -> None:
    loop: Loop[int] = Loop(lambda _: None, lambda _: 1.0)
    loop.close()
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for number in range(3)]
    try:
        assert loop._wake_fd in fds, "the number was not given out again: this shows nothing"
        with pytest.raises(ServerGoneError, match="has stopped"):
            loop.post(1)
        loop.stop()
        loop.close()
        assert [os.fstat(fd).st_size for fd in fds] == [0, 0, 0]
    finally:
        for fd in fds:
            os.close(fd)


def test_what_other_threads_post_does_not_keep_a_socket_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping is answered between the items of a thousand copies that have ended."""
    monkeypatch.setattr(loop_module, "_TURN_S", 0.0)
    seen: list[object] = []

    def on_item(item: int) -> None:
        seen.append(item)
        if item == 4:
            loop.stop()

    loop: Loop[int] = Loop(on_item, lambda _: 1.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def on_ready(_: int) -> None:
            seen.append(theirs.recv(1))
            loop.forget(theirs.fileno())

        loop.watch(theirs.fileno(), READ, on_ready)
        for number in range(5):
            loop.post(number)
        ours.sendall(b"p")
        loop.run()
    loop.close()
    assert seen.index(b"p") < 2  # an item of its own round came before it, or none
    assert [each for each in seen if each != b"p"] == [0, 1, 2, 3, 4]


def test_a_stopped_server_says_that_it_has_stopped(tmp_path: Path) -> None:
    server = CacheServer(ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu"))
    server.start()
    server.stop()
    for _ in range(2):
        snapshot = server.snapshot()
        assert not snapshot.values
        assert snapshot.report.reasons == ("the server has stopped",)
