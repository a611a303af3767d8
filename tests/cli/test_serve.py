"""`kvferry serve` and the command as a whole."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

import kvferry
from kvferry.cli.children import ServerProcess
from kvferry.cli.serve import _announce
from kvferry.client import CacheClient
from kvferry.config import ServerConfig
from kvferry.server import CacheServer

COMMAND = [sys.executable, "-m", "kvferry", "serve", "--device", "cpu", "--memory", "16MiB", "--socket"]


def test_it_serves_until_it_is_told_to_end(tmp_path: pathlib.Path) -> None:
    socket = tmp_path / "server.sock"
    with subprocess.Popen([*COMMAND, str(socket)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(f"ready: unix://{socket}")
            with CacheClient(f"unix://{socket}") as client:
                client.ping()
            server.send_signal(signal.SIGINT)
            assert server.wait(15) == 0
        finally:
            server.kill()
    assert not socket.exists()


@pytest.mark.parametrize(("missing", "says"), [(0, "ready"), (1 << 20, "")])
def test_it_is_ready_when_all_of_its_memory_is(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], missing: int, says: str
) -> None:
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=16 << 20, device="cpu")
    stop = threading.Event()
    with CacheServer(config) as server:
        server.config = dataclasses.replace(config, memory_bytes=config.memory_bytes + missing)
        announcer = threading.Thread(target=_announce, args=(server, stop))
        announcer.start()
        announcer.join(0.5)
        stop.set()
        announcer.join()
    assert capsys.readouterr().out[:5] == says


def test_it_says_at_once_what_it_does_and_then_where_it_answers(tmp_path: pathlib.Path) -> None:
    socket = tmp_path / "server.sock"
    command = [*COMMAND, str(socket), "--metrics", ":0", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            first = json.loads(server.stderr.readline())
            assert first["message"] == f"starting: 16MiB of host memory, for device cpu, at {socket}"
            ready = server.stdout.readline()
            assert "16 MiB of host memory" in ready
            (url,) = re.findall(r"http://127\.0\.0\.1:[0-9]+/metrics", ready)
            with urllib.request.urlopen(url, timeout=10) as reply:
                assert b"kvferry_healthy 1.0" in reply.read()
            server.terminate()
            records = [json.loads(line) for line in server.stderr]
            assert server.wait(15) == 0
        finally:
            server.kill()
    assert [record["message"] for record in records][-3:] == ["ready", "stopping: SIGTERM came", "stopped"]
    assert [record["memory_bytes"] for record in records if record["message"] == "ready"] == [16 << 20]


def test_others_may_connect_where_they_are_allowed(tmp_path: pathlib.Path) -> None:
    socket = tmp_path / "server.sock"
    with subprocess.Popen([*COMMAND, str(socket), "--allow-uid", "7"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready")
            assert socket.stat().st_mode & 0o777 == 0o666
        finally:
            server.kill()


def test_a_child_server_has_its_own_settings_and_ends_with_its_parents_pipe(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_MAX_SESSIONS", "none")
    server = ServerProcess(tmp_path / "s", 16 << 20, "cpu")
    assert server._process.stdin is not None
    server._process.stdin.close()
    assert server._process.wait(15) == 0
    server.close()


def test_a_server_that_cannot_start_says_why_at_once(tmp_path: pathlib.Path) -> None:
    started = time.monotonic()
    with pytest.raises(ChildProcessError, match="ended with code 2 at its start"):
        ServerProcess(tmp_path / "no" / "such" / "folder", 16 << 20, "cpu")
    assert time.monotonic() - started < 30


def test_why_it_cannot_start_is_a_record_of_the_log(tmp_path: pathlib.Path) -> None:
    command = [*COMMAND, str(tmp_path / "s"), "--listen", "tcp://:0", "--token-file", str(tmp_path / "none")]
    done = subprocess.run([*command, "--log-format", "json"], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["level"] == "error"
    assert last["message"].startswith(f"ended: the token file {tmp_path}/none cannot be read: No such file")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--socket", "s", "--memory", "lots"], "4GiB"),
        (["--socket", "s" * 200], "a path of 1 to 107 bytes"),
        (["--socket", "s", "--allow-uid", "-1"], "allow-uid"),
    ],
)
def test_bad_options_are_one_line_and_no_trace(arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "kvferry", "serve", "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, kvferry.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_without_torch() -> None:
    code = "import sys, kvferry.cli.main; sys.argv[1:] = ['--version']; kvferry.cli.main.app(standalone_mode=False); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["kvferry", kvferry.__version__, "False"]
