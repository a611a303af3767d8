"""`kvferry demo --p2p` as people run it, with a short prompt."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvferry.cli.demo_p2p
from cli.demo_runs import COMMAND, check_nothing_survives
from kvferry.cli.demo_p2p import P2pDemoResult
from kvferry.cli.demo_p2p_view import show_p2p_result
from kvferry.cli.main import app

GOOD = P2pDemoResult(
    tokens_equal=True,
    control_equal=False,
    killed_tokens_equal=True,
    received_tokens=192,
    control_received_tokens=192,
    not_received_because=None,
    prompt_tokens=200,
    ttft_alone_ms=50.0,
    ttft_p2p_ms=60.5,
    last_layer_ms=1.5,
    after_landing_ms=7.5,
    transfer_bytes=24 << 20,
    transfer_s=0.0125,
    transfer_gb_s=2.01,
    carrier="host",
    not_better_because="not ipc: [too] far away",
    killed_after_layers=3,
    num_layers=6,
    killed_learned_ms=11.5,
    killed_reason="the peer hung up [peer_gone]",
    backend="host",
    devices=["cpu", "cpu"],
    tokens_alone=[1, 2],
    tokens_p2p=[1, 2],
    tokens_control=[7, 8],
    tokens_killed=[1, 2],
    seconds=1.0,
)


@pytest.mark.parametrize(("wanted", "carrier"), [("auto", "ipc"), ("host", "host")])
@pytest.mark.timeout(150)  # two engines read five prompts
def test_json_has_the_promised_fields_and_the_promises_hold(wanted: str, carrier: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--p2p", "--carrier", wanted, "--json"], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: type(value) for name, value in result.items()} == {
        name: type(value) for name, value in dataclasses.asdict(GOOD).items()
    }
    assert (result["tokens_equal"], result["control_equal"], result["killed_tokens_equal"]) == (True, False, True)
    assert len(result["tokens_alone"]) == 8
    assert result["tokens_alone"] == result["tokens_p2p"] == result["tokens_killed"] != result["tokens_control"]
    assert result["received_tokens"] == result["control_received_tokens"] == 192
    assert result["transfer_bytes"] == 192 * 6 * 2 * 4 * 64 * 4
    assert all(result[name] > 0 for name in ("transfer_s", "last_layer_ms", "after_landing_ms"))
    assert result["ttft_p2p_ms"] > result["last_layer_ms"] + result["after_landing_ms"]
    assert result["carrier"] == carrier
    assert (result["killed_after_layers"], result["num_layers"]) == (3, 6)
    assert "peer_gone" in result["killed_reason"]
    assert 0 < result["killed_learned_ms"] < 6000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_and_no_file_survives_an_interruption(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    check_nothing_survives([*COMMAND, "--p2p"], number, tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens_equal": False}, "differ from the decode engine's own"),
        ({"control_equal": True}, "shows nothing"),
        ({"killed_tokens_equal": False}, "after the prefill engine was killed differ"),
        ({"received_tokens": 0, "not_received_because": "a [b]"}, "no token's KV was received: a [b]"),
        ({"control_received_tokens": 0}, "control received no token's KV"),
        ({"killed_reason": None}, "not in mid-transfer"),
        ({"killed_learned_ms": 6001.0}, "not noticed within 6000 ms"),
    ],
)
def test_a_broken_promise_is_told_and_is_the_exit_code(
    change: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(kvferry.cli.demo_p2p, "run_demo_p2p", lambda config, carrier, say: result)
    done = CliRunner().invoke(app, ["demo", "--device", "cpu", "--p2p"])
    assert done.exit_code == 1
    assert text in " ".join(done.stdout.split())


def test_the_table_tells_all_figures() -> None:
    console = Console(record=True, width=120)
    show_p2p_result(console, GOOD)
    text = " ".join(console.export_text().split())
    for part in ("192 tokens", "50.0 ms", "60.5 ms", "1.5 ms", "7.5 ms", "1 2", "7 8", "2 tokens, equal"):
        assert part in text
    for part in ("24 MiB in 12.5 ms, 2.01 GB/s, by host", "not ipc: [too] far away", "3 of 6 layers", "11.5 ms later"):
        assert part in text
    assert "the peer hung up [peer_gone]" in text
    assert "BROKEN" not in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--carrier", "host"], "goes with --p2p"),
        (["--p2p", "--carrier", "pigeon"], "'pigeon' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert text in done.output


def test_a_prompt_of_one_chunk_is_refused_with_what_to_do() -> None:
    done = CliRunner().invoke(app, ["demo", "--device", "cpu", "--p2p", "--prompt-tokens", "64"])
    assert isinstance(done.exception, ValueError)
    assert "more than 64" in str(done.exception)


@pytest.mark.timeout(100)
def test_a_carrier_that_cannot_move_it_is_refused_in_the_engines_words() -> None:
    done = subprocess.run(
        [*COMMAND, "--p2p", "--carrier", "nccl"], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 2
    assert "carrier nccl cannot move KV caches on cpu" in done.stderr
    assert "Traceback" not in done.stderr
