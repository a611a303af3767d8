"""`kvferry demo` and the benchmarks on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def run_json(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvferry", *arguments, "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_demo_keeps_its_promise_on_cuda() -> None:
    result = run_json("demo", "--prompt-tokens", "2000")
    assert (result["backend"], result["wrapper"]) == ("cuda", "raw")
    assert result["tokens_equal"] is True
    assert result["control_equal"] is False
    assert result["reused_tokens"] == 1984
    assert result["memory_back_ms"] < 500


def test_bench_ipc_on_cuda() -> None:
    found = run_json("bench", "ipc", "--size", "1GiB", "--held", "1GiB", "--repeats", "3", "--kills", "2")
    results = {result["name"]: result for result in found["results"]}
    assert results["register_80_layers_opens"]["value"] == 1
    assert results["register_80_layers"]["value"] < 10
    assert results["memory_back"]["value"] < 500


def test_bench_store_on_cuda() -> None:
    found = run_json("bench", "store", "--size", "8MiB", "--size", "256MiB", "--repeats", "3", "--lookups", "20")
    names = {result["name"] for result in found["results"]}
    assert {"store", "retrieve", "store_8_mib", "retrieve_8_mib", "lookup_16384", "engine_slowdown"} <= names
