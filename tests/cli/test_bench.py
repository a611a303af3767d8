"""The benchmarks at sizes that tell nothing, for the shape of what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from kvferry.cli.bench_report import Result, as_object, rate_result, show


def run_bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvferry", "bench", *arguments, "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["bench"] == arguments[0]
    assert found["machine"]["backend"] == "host"
    for result in found["results"]:
        assert {"name", "value", "unit", "limit", "ratio"} <= set(result)
        assert result["value"] > 0
        assert (result["limit"] is None) == (result["ratio"] is None)
    return {result["name"]: result for result in found["results"]}


def test_bench_ipc() -> None:
    results = run_bench("ipc", "--size", "8MiB", "--held", "8MiB", "--repeats", "2", "--kills", "1")
    assert set(results) == {"register_80_layers", "register_80_layers_opens", "mapped_read", "memory_back"}
    assert results["register_80_layers_opens"]["value"] == 1
    assert results["memory_back"]["unit"] == "ms"
    assert 0 < results["memory_back"]["value"] < 10_000  # ms; how fast it is here is the benchmark's to say


def test_bench_store() -> None:
    results = run_bench("store", "--size", "8MiB", "--size", "16MiB", "--repeats", "2", "--lookups", "5")
    assert {"store", "retrieve", "store_8_mib", "retrieve_8_mib", "lookup_16384", "lookup_16384_list"} == set(results)
    assert results["store"]["unit"] == "GB/s"
    assert results["lookup_16384"]["value"] < 50


@pytest.mark.parametrize("carrier", ["ipc", "host"])
def test_bench_p2p(carrier: str) -> None:
    results = run_bench("p2p", "--carrier", carrier, "--size", "2MiB", "--block", "64KiB", "--repeats", "1")
    name = f"p2p_{carrier}"
    rates = {f"{name}_{at_once}2_mib_64_kib_{ids}" for at_once in ("", "8_x_") for ids in ("shuffled", "neighbours")}
    headline = f"{name}_8_x_2_mib_64_kib_shuffled"
    assert set(results) == {name, f"{name}_latency", f"{name}_last_layer", *rates} - {headline}
    assert next(iter(results)) == name
    assert results[name]["unit"] == "GB/s"


@pytest.mark.parametrize("carrier", ["pigeon", "nccl"])
def test_a_carrier_that_cannot_be_measured_is_refused(carrier: str) -> None:
    command = [sys.executable, "-m", "kvferry", "bench", "p2p", "--carrier", carrier, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert carrier in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_a_size_too_small_for_a_chunk_is_refused() -> None:
    command = [sys.executable, "-m", "kvferry", "bench", "store", "--device", "cpu", "--size", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "multiple of 8 MiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rate_is_beside_its_limit() -> None:
    result = rate_result("store", 2_000_000_000, 0.5, 0.4, "")
    assert (result.value, result.limit) == (4.0, 5.0)
    assert result.ratio == pytest.approx(0.8)


def test_the_table_and_the_object_tell_the_same() -> None:
    results = [Result("a", 1.5, "ms", 3.0, 0.5, "something"), Result("b", 2, "opens")]
    console = Console(record=True, width=120)
    show(console, "ipc", results)
    text = console.export_text()
    assert "1.5 ms" in text
    assert "0.500" in text
    assert as_object("ipc", {"cpus": 2}, results)["results"][1]["limit"] is None


def test_names_are_whole_on_a_narrow_terminal() -> None:
    names = [f"p2p_host_8_x_64_mib_64_kib_{order}" for order in ("shuffled", "neighbours")]
    console = Console(record=True, width=80)
    show(console, "p2p", [rate_result(name, 1 << 30, 0.5, 0.4, "what it is " * 9) for name in names])
    rows = [line.split("│")[1].strip() for line in console.export_text().splitlines() if line.startswith("│")]
    assert "".join(rows) == "".join(names)
