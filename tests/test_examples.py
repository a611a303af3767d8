"""The examples run as their first lines say."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from kvferry.cli.children import ServerProcess

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout


def test_share_tensor() -> None:
    assert "sum is now 1024 of 1024 elements" in run("share_tensor.py")


def test_reuse_kv(tmp_path: pathlib.Path) -> None:
    with ServerProcess(tmp_path / "kvferry.sock", 64 << 20, "auto", timeout_s=30) as server:
        out = run("reuse_kv.py", server.url)
    assert "found 192 of 200 tokens" in out
    assert "bytes are equal: True" in out
