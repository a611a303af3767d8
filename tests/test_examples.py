"""The examples run as their first lines say."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from kvferry.cli.children import ServerProcess

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)


def run(name: str, *arguments: str) -> str:
    ended = start(name, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_share_tensor() -> None:
    assert "sum is now 1024 of 1024 elements" in run("share_tensor.py")


def test_reuse_kv_twice(tmp_path: pathlib.Path) -> None:
    with ServerProcess(tmp_path / "kvferry.sock", 64 << 20, "auto", timeout_s=30) as server:
        first = run("reuse_kv.py", server.url)
        second = run("reuse_kv.py", server.url)
    assert "nothing was there: storing" in first
    assert "found 192 of 200 tokens" in first
    assert "their bytes are equal: True" in first
    assert second.splitlines() == ["192 of 200 tokens were there already", "their bytes are equal: True"]


def test_reuse_kv_without_a_server_or_its_address(tmp_path: pathlib.Path) -> None:
    alone = start("reuse_kv.py", str(tmp_path / "none.sock"))
    assert (alone.returncode, len(alone.stderr.splitlines())) == (1, 1)
    assert "no server answers at" in alone.stderr
    bare = start("reuse_kv.py")
    assert (bare.returncode, len(bare.stderr.splitlines())) == (2, 1)
    assert bare.stderr.startswith("usage: ")
