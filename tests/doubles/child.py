"""A `Side` in a child process, asked from a test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_TESTS = Path(__file__).resolve().parent.parent


class ChildError(Exception):
    """The child's operation raised; `kind` is the name of what it raised."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Child:
    """Start it, `call` it, `kill` or `close` it; file descriptors come and go over `sock`."""

    def __init__(self, *, fake: bool, visible: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(30)
        with theirs:
            arguments = ["1" if fake else "0", ",".join(map(str, visible)), str(theirs.fileno())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "doubles.side", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd=_TESTS,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(_TESTS), *filter(None, sys.path)]),
                    **(env or {}),
                },
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, op: str, *, timeout_s: float = 40.0, **arguments: Any) -> dict[str, Any]:
        self.ask(op, **arguments)
        return self.answer(timeout_s)

    def ask(self, op: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 40.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"the child did not answer within {timeout_s} s")
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the child ended with {self.process.wait(timeout=10)}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply and "token" not in reply:
            raise ChildError(reply["kind"], reply["error"])
        return reply

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still to be written to one that died
                    stream.close()
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.process.poll() is None:
            self.kill()
        self.sock.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
