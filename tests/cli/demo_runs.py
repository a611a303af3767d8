"""`kvferry demo` as people run it, with a short prompt; and what is left when it is interrupted."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

COMMAND = [sys.executable, "-m", "kvferry", "demo", "--device", "cpu", "--prompt-tokens", "200", "--new-tokens", "8"]
# Where the tests run in the background of a shell, SIGINT is ignored, and children would inherit that.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def check_nothing_survives(command: list[str], number: signal.Signals, folder: pathlib.Path) -> None:
    """Interrupt it once it has two children: no child and, unless it was killed, no file in `folder` survives."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as demo:
        try:
            _wait_for(lambda: len(_descendants(demo.pid)) >= 2)
            children = _descendants(demo.pid)
            demo.send_signal(number)
            demo.wait(20)
        finally:
            demo.kill()
    assert demo.returncode != 0
    _wait_for(lambda: not any(_alive(pid) for pid in children))
    if number != signal.SIGKILL:
        assert not list(folder.iterdir())


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _alive(pid: int) -> bool:
    """A process that is there and no zombie."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _wait_for(condition: Callable[[], bool], timeout_s: float = 25.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
