"""Child processes that answer one JSON object a line, so that tests and tools can drive them, and kill them.

A command line is a msgspec struct with a tag; a reply is `{"ok": true, ...}` or `{"ok": false, "error": ...}`. A child
ends on its `exit` command and when its stdin closes, so it never outlives what drives it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import msgspec

from kvferry.errors import DeadlineError, KVFerryError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineProcess", "LineProcess", "answer_lines"]


def answer_lines(commands: Any, handle: Callable[[Any], dict[str, Any]], exit_command: type[msgspec.Struct]) -> None:
    """The child's side: answer commands of the union `commands` from stdin until `exit_command` or the end of stdin.

    What `handle` raises for a reason that the driver should know becomes a refusal; anything else ends the process.
    """
    decoder = msgspec.json.Decoder(commands)
    for line in sys.stdin.buffer:
        command: msgspec.Struct | None = None
        try:
            command = decoder.decode(line)
            reply = {"ok": True, **handle(command)}
        except (KVFerryError, ValueError, MemoryError, RuntimeError) as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            return  # the driver has ended, and with it what this process is for
        if isinstance(command, exit_command):
            return


class LineProcess:
    """One child that runs `module`, in a session of its own so that Ctrl-C reaches only us. One thread at a time."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # Idle OpenMP threads that spin cost ten times the computing time where other processes need the cores.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self._process.returncode is None else f"ended with {self._process.returncode}"
        return f"<{type(self).__name__} {self.name!r} pid {self.pid} {state}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, command: msgspec.Struct, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send one command and wait for its reply.

        Raises `ChildProcessError` with the child's own words where it refused or ended, `DeadlineError` where it
        did not answer; it must then be killed, since its next answer would belong to this command.
        """
        deadline = time.monotonic() + timeout_s
        self._send(command, deadline)
        return self._receive(deadline)

    def begin(self, command: msgspec.Struct, timeout_s: float = 60.0) -> None:
        """Send one command without waiting for its reply, which `finish` returns; for children that work at once."""
        self._send(command, time.monotonic() + timeout_s)

    def finish(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for the reply of the command that `begin` sent; raises as `call` does."""
        return self._receive(time.monotonic() + timeout_s)

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL and reap. Idempotent."""
        self.send_kill()
        self._process.wait(timeout_s)
        self._close_pipes()

    def send_kill(self) -> None:
        """SIGKILL without waiting for the end, for those who time what follows; `kill` or `close` must come after."""
        self._process.kill()

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the child end by itself (stdin closes), kill it where it does not. Idempotent."""
        self._close_pipes()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _close_pipes(self) -> None:
        self._stdin.close()
        self._stdout.close()

    def _send(self, command: msgspec.Struct, deadline: float) -> None:
        data = msgspec.json.encode(command) + b"\n"
        try:
            while data:
                self._await(self._stdin, selectors.EVENT_WRITE, deadline)
                data = data[os.write(self._stdin.fileno(), data) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        reply: dict[str, Any] = msgspec.json.decode(self._read_line(deadline))
        if not reply.pop("ok"):
            raise ChildProcessError(f"{self.name}: {reply['error']}")
        return reply

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            self._await(self._stdout, selectors.EVENT_READ, deadline)
            data = os.read(self._stdout.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _await(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(f"{self.name} (pid {self.pid}) gave no answer in time")

    def _ended(self) -> ChildProcessError:
        code = self._process.wait(10)
        return ChildProcessError(f"{self.name} (pid {self.pid}) ended with code {code}; see its stderr")


class EngineProcess(LineProcess):
    """A reference engine in its own process; its commands are in `kvferry.reference.worker`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"engine {name}", "kvferry.reference.worker")
