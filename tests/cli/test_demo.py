"""`kvferry demo` as people run it, with a short prompt."""

from __future__ import annotations

import json
import subprocess
import sys

COMMAND = [sys.executable, "-m", "kvferry", "demo", "--device", "cpu", "--prompt-tokens", "200", "--new-tokens", "8"]
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
