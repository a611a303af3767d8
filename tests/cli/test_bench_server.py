"""`kvferry bench server`, at sizes that tell nothing: the shape of what it prints, and its clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.bench_clients import Lookups, Pings
from kvferry.cli.bench_server import ServerBenchConfig
from kvferry.reference.process import LineProcess


def test_bench_server() -> None:
    command = [sys.executable, "-m", "kvferry", "bench", "server", "--json", "--seconds", "1.5", "--clients", "1"]
    command += ["--clients", "3", "--lookup-seconds", "0.2", "--lookups", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["bench"], found["machine"]["backend"]) == ("server", "host")
    results = {result["name"]: result for result in found["results"]}
    assert set(results) == {
        "lookup_16384",
        *(f"{name}_{count}" for name in ("lookups_per_s", "lookup_p50", "lookup_p99") for count in (1, 3)),
        "server_rss_slope",
    }
    for result in results.values():
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"])
    assert 0 < results["lookup_p50_3"]["value"] <= results["lookup_p99_3"]["value"]
    assert results["lookups_per_s_3"]["unit"] == "1/s"
    assert results["server_rss_slope"]["unit"] == "bytes/s"


def test_clients_that_cannot_connect_fail_the_bench(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"unix://{tmp_path}/nobody"
    with LineProcess("clients", "kvferry.cli.bench_clients") as clients:
        for command in (
            Pings(url=url, clients=2, seconds=0.1),
            Lookups(url=url, clients=2, seconds=0.1, engine_id="e"),
        ):
            with pytest.raises(ChildProcessError, match="could not start"):
                clients.call(command)
    assert "ServerGoneError" in capfd.readouterr().err


def test_a_bench_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        ServerBenchConfig(clients=())
    with pytest.raises(ValueError, match="above 0"):
        ServerBenchConfig(seconds=0)
