"""The fixtures of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.link_server import Server
from kvferry.client.link import Link
from kvferry.protocol.address import UnixAddress
from kvferry.protocol.messages import Welcome
from serving.fixtures import stage, zygote

__all__ = ["stage", "zygote"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def link(server: Server, tmp_path: Path) -> Iterator[Link]:
    thread = server.greet(Welcome(1, b"i" * 16))
    made = Link(UnixAddress(str(tmp_path / "s")), 5)
    thread.join()
    yield made
    made.close()
