"""A remote tier below real servers: what one puts there the others find, and what it does wrong is a miss."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cache.tiers.conftest import S3
from cache.tiers.lying_server import Answer, LyingServer, hangs, raw, says
from serving.process import Side, eventually
from serving.tiers import CHUNK, MakeStage, load, settle, started, stats, store


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_what_one_server_stored_another_one_finds(make_stage: MakeStage, tmp_path: Path, s3: S3, kind: str) -> None:
    config: dict[str, Any] = {"remote_url": f"file://{tmp_path}/shared"}
    if kind == "s3":
        config = {"remote_url": s3.url(), "remote_options": s3.options}
    engine = started(make_stage("one", **config))
    held = store(engine, 1, 6)
    assert settle(engine, "remote")["remote_bytes_written"] == 6 * CHUNK
    other = started(make_stage("two", **config, disk_path=str(tmp_path / "disk"), disk_bytes=64 << 20))
    assert load(other, 1, 6, held) == 6
    values = settle(other)
    assert values["remote_chunks_read"] == values["disk_chunks_written"] == 6
    longer = store(other, 1, 8)
    assert settle(other, "remote")["remote_chunks_written"] == 2
    eventually(lambda: stats(engine)["remote_queue"] == 0)
    assert load(engine, 1, 8, longer) == 8
    assert other.call("clear")["cleared"] == 8
    eventually(lambda: stats(other)["remote_deleting"] == 0)
    assert load(other, 1, 8, longer) == 0


def calm(engine: Side, stop: threading.Event, late: list[float]) -> None:
    """Ping all the time; what takes a second is noted."""
    while not stop.is_set():
        ms = engine.call("ping")["ms"]
        if ms > 1000:
            late.append(ms)


@pytest.mark.parametrize(
    ("answer", "counter"),
    [
        (hangs(), "remote_paused"),
        (raw(b"not http at all\r\n\r\n"), "remote_paused"),
        (says("200 OK", b"x" * 100), "remote_corrupt"),
    ],
    ids=["hangs", "babbles", "lies"],
)
def test_a_remote_tier_that_does_not_work_costs_hits_and_nothing_else(
    make_stage: MakeStage, answer: Answer, counter: str
) -> None:
    with LyingServer(answer) as server:
        options = {"endpoint": server.endpoint, "access_key_id": "k", "secret_access_key": "s", "region": "r"}
        stage = make_stage(remote_url="s3://bucket/x", remote_options=options, memory_bytes=32 * CHUNK)
        engine = started(stage)
        pinging = started(stage, register={"engine_id": "pinging"})
        stop, late = threading.Event(), list[float]()
        thread = threading.Thread(target=calm, args=(pinging, stop, late))
        thread.start()
        begun = time.monotonic()
        assert load(engine, 1, 4, [], wait_s=1) == 0
        assert time.monotonic() - begun < 8  # the wait and the engine's own time, not the remote tier's
        held = {seed: store(engine, seed, 4) for seed in range(2, 12)}
        assert stats(engine)["stores_failed"] == 0
        assert load(engine, 11, 4, held[11], wait_s=0) == 4
        eventually(lambda: stats(engine)[counter] > 0, 40)
        stop.set()
        thread.join(20)
        assert late == []
