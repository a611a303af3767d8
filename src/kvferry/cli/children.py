"""The cache server as a child process, for commands that bring their own."""

from __future__ import annotations

import os
import pathlib
import selectors
import subprocess
import sys
import time
from types import TracebackType

from kvferry.errors import DeadlineError

__all__ = ["ServerProcess"]


class ServerProcess:
    """`kvferry serve` in a session of its own; it ends with this object, and with this process however that dies."""

    def __init__(self, socket: pathlib.Path, memory_bytes: int, device: str, timeout_s: float = 60.0) -> None:
        self.url = f"unix://{socket}"
        command = [sys.executable, "-m", "kvferry", "serve", "--log-level", "warning", "--socket", str(socket)]
        self._process = subprocess.Popen(
            [*command, "--memory", str(memory_bytes), "--device", device, "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")},
            start_new_session=True,
        )
        try:
            self._await_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL where that is not obeyed in time. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _await_ready(self, deadline: float) -> None:
        assert self._process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in line:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError("the cache server did not get ready in time; see its messages above")
                data = os.read(self._process.stdout.fileno(), 4096)
                if not data:
                    raise ChildProcessError(f"the cache server ended with code {self._process.wait(10)} at its start")
                line += data
