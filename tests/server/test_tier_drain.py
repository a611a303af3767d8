"""The end of a server with lower tiers: it takes its time for them, but not more than it is given."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.tiers import setup as tier_setup
from serving.process import eventually
from tier_bench import SPACE, keys

CHUNK = 4096


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> MemoryTier:
    disk = MemoryTier()
    monkeypatch.setattr(tier_setup, "DiskTier", lambda path: disk)
    return disk


def started(tmp_path: Path, drain_s: float) -> CacheServer:
    server = CacheServer(
        ServerConfig(
            socket_path=str(tmp_path / "s"),
            memory_bytes=1 << 20,
            device="cpu",
            disk_path=str(tmp_path / "disk"),
            disk_bytes=64 << 20,
            write_policy="write-back",
            drain_s=drain_s,
        )
    )
    server.start()
    eventually(lambda: server.snapshot().values.get("memory_bytes", 0) >= 1 << 20)
    eventually(lambda: not server.snapshot().values["disk_scanning"])
    return server


def store(server: CacheServer, prompt: str) -> None:
    """As a worker does, while the loop has nothing to do."""
    state = server._parts.state
    reservation = state.index.reserve(SPACE, keys(prompt), CHUNK)
    state.tiers.on_stored(state.index.commit(reservation.chunks, dirty=True))


@pytest.mark.parametrize("hurry", [False, True])
def test_what_could_not_be_written_in_time_is_told(
    tmp_path: Path, disk: MemoryTier, caplog: pytest.LogCaptureFixture, *, hurry: bool
) -> None:
    server = started(tmp_path, 1000 if hurry else 0.2)
    store(server, "abc")
    disk.stop("write")
    if hurry:
        server.hurry()
    thread = threading.Thread(target=server.stop)
    with caplog.at_level(logging.ERROR):
        thread.start()
        eventually(lambda: bool(caplog.records))
        disk.let_go()
        thread.join(20)
    assert not server.running
    (record,) = caplog.records
    assert (vars(record)["chunks"], vars(record)["bytes"]) == (3, 3 * CHUNK)


def test_an_end_waits_for_writes(tmp_path: Path, disk: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    server = started(tmp_path, 30)
    store(server, "abc")
    server.stop()
    assert len(disk.chunks) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
