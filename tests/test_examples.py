"""The examples run as their first lines say."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout


def test_share_tensor() -> None:
    assert "sum is now 1024 of 1024 elements" in run("share_tensor.py")


def test_reuse_kv(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "kvferry.sock"
    serve = [sys.executable, "-m", "kvferry", "serve", "--socket", str(path), "--memory", "64MiB", "--device", "auto"]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 30
            while not path.exists() and server.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            out = run("reuse_kv.py", str(path))
        finally:
            server.terminate()
            server.wait(timeout=30)
    assert "found 192 of 200 tokens" in out
    assert "bytes are equal: True" in out
