"""`kvferry demo` as people run it, with a short prompt."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvferry.cli.demo
from cli.demo_runs import COMMAND, check_nothing_survives
from kvferry.cli.demo import DemoConfig, DemoResult
from kvferry.cli.demo_view import show_result
from kvferry.cli.main import app

PROMISED = {
    "tokens_equal": bool,
    "control_equal": bool,
    "reused_tokens": int,
    "ttft_cold_ms": float,
    "ttft_reused_ms": float,
    "memory_back_ms": float,
    "backend": str,
    "wrapper": str,
}
GOOD = DemoResult(
    tokens_equal=True,
    control_equal=False,
    reused_tokens=192,
    control_reused_tokens=192,
    prompt_tokens=200,
    ttft_cold_ms=50.0,
    ttft_reused_ms=10.0,
    engine_a_prefill_ms=50.0,
    engine_a_store_ms=1.0,
    memory_back_ms=12.5,
    memory_back_bytes=100 << 20,
    memory_back_seen="free",
    backend="host",
    wrapper="host",
    tokens_reused=[1, 2],
    tokens_cold=[1, 2],
    tokens_control=[7, 8],
    seconds=1.0,
)


def test_json_has_the_promised_fields_and_the_promise_holds() -> None:
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: type(result[name]) for name in PROMISED} == PROMISED
    assert result["tokens_equal"] is True
    assert result["control_equal"] is False
    assert result["reused_tokens"] == 192
    assert result["tokens_cold"] == result["tokens_reused"] != result["tokens_control"]
    assert (result["backend"], result["wrapper"]) == ("host", "host")
    assert 0 < result["memory_back_ms"] < 500
    assert result["memory_back_bytes"] >= 100 << 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_and_no_file_survives_an_interruption(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    check_nothing_survives(COMMAND, number, tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens_equal": False}, "tokens with reuse differ"),
        ({"control_equal": True}, "shows nothing"),
        ({"reused_tokens": 0}, "no token was reused"),
        ({"control_reused_tokens": 0}, "control reused no token"),
        ({"memory_back_ms": None}, "did not come back"),
    ],
)
def test_a_broken_promise_is_told_and_is_the_exit_code(
    change: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(kvferry.cli.demo, "run_demo", lambda config, say: result)
    done = CliRunner().invoke(app, ["demo", "--device", "cpu"])
    assert done.exit_code == 1
    assert text in " ".join(done.stdout.split())


def test_the_table_tells_all_figures() -> None:
    console = Console(record=True, width=120)
    show_result(console, GOOD)
    text = console.export_text()
    for part in ("192", "50.0 ms", "10.0 ms", "1 2", "7 8", "equal", "5.0 times", "100 MiB", "12.5 ms"):
        assert part in text
    assert "BROKEN" not in text


def test_default_sizes_suit_the_device() -> None:
    config = DemoConfig(device="cpu").resolved()
    prompt, other = config.prompts()
    assert len(prompt) == len(other) == config.prompt_tokens
    assert prompt != other
    assert config.engine().paged.num_blocks * 16 >= 3 * config.prompt_tokens
