"""A server and an engine that share neither PIDs nor System V IPC, on a GPU: works, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolation import isolated_engine, isolated_server, missing_namespaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(missing_namespaces() is not None, reason=str(missing_namespaces())),
]


def test_a_raw_handle_is_refused_at_once_and_says_why(tmp_path: Path) -> None:
    with isolated_server(tmp_path, "cuda") as url:
        said = isolated_engine(url, "cuda", "raw")
    assert said["pid"] == 1
    assert said["seconds"] < 5
    if said["outcome"] != "works":
        assert "pid namespace" in said["outcome"]
        assert "raw" in said["outcome"]


def test_virtual_memory_and_semaphores_cross_namespaces(tmp_path: Path) -> None:
    expandable = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    with isolated_server(tmp_path, "cuda") as url:
        said = isolated_engine(url, "cuda", "vmm", expandable)
    assert said["outcome"] == "works"
    assert said["equal"]
