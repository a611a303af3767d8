"""A short run of `scripts/chaos`: engines and their server are killed under load, with memory, disk, object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soak import chaos, storm

KILLS = 50


@pytest.mark.timeout(180)
def test_killed_engines_and_servers_leave_nothing_and_no_byte_is_wrong(tmp_path: Path) -> None:
    result = chaos.run(KILLS, 1, tmp_path, remote=True)
    assert result["violations"] == [], json.dumps(result["violations"], indent=1)
    assert result["ok"], json.dumps(result)
    assert result["kills"] >= KILLS
    assert min(result["killed"].values()) > 5
    assert len(result["points"]["engine"]) > 3


@pytest.mark.timeout(120)
def test_many_threads_are_served_while_the_server_collects_garbage(tmp_path: Path) -> None:
    """S3: a ping takes less than a second, also at the 99th percentile."""
    result = storm.run(4.0, 1, tmp_path)
    assert result["violations"] == []
    assert result["ok"], json.dumps(result)
