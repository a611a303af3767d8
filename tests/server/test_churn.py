"""Thousands of sessions that come and go, each in its own way: the server has nothing left of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.process import Stage, Zygote, eventually
from serving.raw import Raw
from serving.tokens import TOKENS, token_file, welcomed
from soak.sessions import footprint, open_and_drop

MIB = 1 << 20


@pytest.mark.timeout(120)
def test_sessions_opened_and_dropped_leave_nothing(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, listen="tcp://127.0.0.1:0", token_file=token_file(tmp_path))
    try:
        _, tcp = stage.server.call("urls")["urls"]
        watcher = welcomed(stage.path, TOKENS["a"])
        churn(stage, tcp, 350)
        settle(watcher)
        before, files = footprint(stage.server.pid)
        churn(stage, tcp, 2000)
        settle(watcher)
        after, files_after = footprint(stage.server.pid)
        assert files_after == files
        assert after - before < 3 * MIB
        watcher.close()
    finally:
        stage.close()


def churn(stage: Stage, tcp: str, count: int) -> None:
    for number in range(count):
        open_and_drop(stage.path, tcp, number)


def settle(watcher: Raw) -> None:
    eventually(lambda: watcher.stats()["sessions"] == 1, 20)
