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

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(120)
        settings = {
            "OMP_NUM_THREADS": "1",  # more threads that spin make two engines at once very slow
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_LOGGING_LEVEL": "INFO",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path)),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_engine.engine_zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **settings},
            )

    def start(self, **arguments: Any) -> Engine:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"s"], [theirs.fileno()])
            (pid,) = PID.unpack(self._control.recv(PID.size))
        engine = Engine(pid, ours)
        try:
            engine.call("start", timeout_s=400, **arguments)
        except BaseException:
            engine.kill()
            raise
        return engine

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


class Engine:
    """The test's end of an `EngineSide`."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._socket = sock
        self._lines = sock.makefile("rb")

    def ask(self, op: str, **arguments: Any) -> None:
        """Send a command; `answer` gets what comes of it."""
        self._socket.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")

    def answer(self, timeout_s: float = 90.0) -> Any:
        if not select.select([self._socket], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer within {timeout_s} s")
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the engine's process is gone")
        reply = json.loads(line)
        if not reply.pop("ok"):
            raise RuntimeError(reply["error"])
        return reply

    def call(self, op: str, timeout_s: float = 90.0, **arguments: Any) -> Any:
        self.ask(op, **arguments)
        return self.answer(timeout_s)

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **prompt: Any) -> Any:
        return self.call("generate", prompts=prompts, max_tokens=max_tokens, **prompt)

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """SIGKILL, and wait until it has happened."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        eventually(lambda: not self.alive)
        self._close()

    def end(self) -> None:
        """Have it shut down, and wait for that."""
        self._close()
        try:
            eventually(lambda: not self.alive, 30)
        except TimeoutError:
            self.kill()
            raise

    def _close(self) -> None:
        self._lines.close()
        self._socket.close()


class Server:
    """`kvferry serve` on the socket at `path`; starts when made."""

    def __init__(self, path: Path, *options: str) -> None:
        self.url = f"unix://{path}"
        command = [sys.executable, "-m", "kvferry", "serve", "--socket", str(path), "--device", "cpu"]
        self._command = [*command, "--memory", "256MiB", *options, "--until-stdin-closes"]
        self._process = self._start()

    def restart(self, *options: str) -> None:
        """Start again after `kill`, where it was, maybe with more options."""
        self._command += options
        self._process = self._start()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def freeze_at_load(self, engine: Engine, num_loads: int) -> None:
        """Have the engine's next step begin so many loads, of which the server hears nothing: it stops just before."""
        engine.call("freeze_at_load", pid=self._process.pid)
        engine.call("step")
        assert engine.call("loading")["count"] == num_loads

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

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._hang_up()

    def close(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            self._process.wait(30)
        self._hang_up()

    def _hang_up(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], 30)[0] or not process.stdout.readline():
            process.kill()
            raise TimeoutError("the cache server did not get ready")
        return process


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Return when `condition` holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.01)
