"""A server and an engine that share neither PIDs nor System V IPC, on host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolation import isolated_engine, isolated_server, missing_namespaces


@pytest.mark.skipif(missing_namespaces() is not None, reason=str(missing_namespaces()))
def test_host_memory_crosses_namespaces(tmp_path: Path) -> None:
    with isolated_server(tmp_path, "cpu") as url:
        said = isolated_engine(url, "cpu", "auto")
    assert said["pid"] == 1
    assert said["outcome"] == "works"
    assert said["equal"]
