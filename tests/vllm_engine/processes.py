"""Engines and cache servers in processes of their own, asked from a test."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry import CacheClient
from vllm_engine.engine_zygote import PID

HERE = Path(__file__).resolve().parent
PAGE = 4096


class Zygote:
    """Forks engines. Close it last."""

    module = "vllm_engine.engine_zygote"
    import_s = 120.0

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(self.import_s)
        settings = {
            "OMP_NUM_THREADS": "1",  # more threads that spin make two engines at once very slow
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_LOGGING_LEVEL": "INFO",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path)),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **settings},
            )

    def start(self, log: Path, **arguments: Any) -> Engine:
        """A new engine."""
        engine = Engine(*self._fork())
        try:
            engine.call("start", timeout_s=400, log=str(log), **arguments)
        except BaseException:
            engine.kill()
            raise
        return engine

    def serve(self, log: Path, arguments: list[str]) -> Process:
        """A new cache server, that is ready."""
        server = Process(*self._fork())
        server.send({"op": "serve", "log": str(log), "arguments": [*arguments, "--until-stdin-closes"]})
        try:
            server.receive(60)
        except BaseException:
            server.kill()
            raise
        return server

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"s"], [theirs.fileno()])
            (pid,) = PID.unpack(self._control.recv(PID.size))
        return pid, ours

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


class Process:
    """A child of the zygote, and our end of its socket."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._socket = sock
        self._lines = sock.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> bytes:
        """The next line."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer within {timeout_s} s")
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the process is gone")
        return line

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it has happened."""
        self.signal(signal.SIGKILL)
        eventually(lambda: not self.alive)
        self.hang_up()

    def end(self) -> None:
        """Have it shut down, and wait for that."""
        self.hang_up()
        try:
            eventually(lambda: not self.alive, 60)
        except TimeoutError:
            self.kill()
            raise

    def hang_up(self) -> None:
        self._lines.close()
        self._socket.close()


class Engine(Process):
    """An `EngineSide`, asked."""

    def call(self, op: str, timeout_s: float = 90.0, **arguments: Any) -> Any:
        """What a command gives."""
        self.send({"op": op, **arguments})
        return self.reply(timeout_s)

    def reply(self, timeout_s: float) -> Any:
        """What the command gives that was sent last."""
        reply = json.loads(self.receive(timeout_s))
        if not reply.pop("ok"):
            raise RuntimeError(reply["error"])
        return reply

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **prompt: Any) -> Any:
        """Greedy tokens of prompts that come in together."""
        return self.call("generate", prompts=prompts, max_tokens=max_tokens, **prompt)


class Server:
    """`kvferry serve` on the socket at `path`; starts when made."""

    def __init__(self, zygote: Zygote, path: Path, *options: str) -> None:
        self.url = f"unix://{path}"
        self._zygote = zygote
        self._log = path.with_suffix(".log")
        self._arguments = ["--socket", str(path), "--device", "cpu", "--memory", "256MiB", *options]
        self._process = zygote.serve(self._log, self._arguments)

    def restart(self) -> None:
        """Start again after `kill`, where it was."""
        self._process = self._zygote.serve(self._log, self._arguments)

    def pause(self) -> None:
        """It lives, and does nothing until `resume`."""
        self._process.signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(self._process.pid))

    def resume(self) -> None:
        self._process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def freeze_at_load(self, engine: Engine, num_loads: int) -> None:
        """Step the engine until it begins so many loads, of which the server hears nothing: it stops just before."""
        engine.call("freeze_at_load", pid=self._process.pid, count=num_loads)

        def begun() -> bool:
            engine.call("step")
            return bool(engine.call("loading")["count"] == num_loads)

        eventually(begun)

    def damage(self) -> None:
        """Change one byte in the middle of the chunks that the server has in memory."""
        lines = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines()
        spans = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines if "memfd:kvferry" in line]
        start, end = max(spans, key=lambda span: span[1] - span[0])
        with open(f"/proc/{self._process.pid}/mem", "r+b", buffering=0) as memory:
            used = []
            for place in range(start, end - PAGE, 16 * PAGE):
                memory.seek(place)
                if any(memory.read(64)):
                    used.append(place)
            place = used[len(used) // 2]
            memory.seek(place)
            byte = memory.read(1)
            memory.seek(place)
            memory.write(bytes([byte[0] ^ 1]))

    def stats(self) -> dict[str, float]:
        with CacheClient(self.url) as client:
            return client.stats()

    def close(self) -> None:
        if self._process.alive:
            self.resume()
            self._process.end()


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has come to all threads: the others go on until the one that gets it has its turn."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Return when `condition` holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.01)
