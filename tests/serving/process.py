"""Servers and engines in processes of their own, asked from a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.zygote import PID

TESTS = Path(__file__).resolve().parent.parent


class SideError(Exception):
    """A command failed in the child; `kind` is the name of what it raised."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Side:
    """A forked process that answers commands."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._socket = sock
        self._lines = sock.makefile("rb")

    def ask(self, op: str, **arguments: Any) -> None:
        """Send a command; `answer` gets what comes of it."""
        self._socket.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")

    def answer(self, timeout_s: float = 40.0) -> dict[str, Any]:
        if not select.select([self._socket], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer within {timeout_s} s")
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the child is gone")
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise SideError(reply["kind"], reply["error"] + "\n" + reply["trace"])
        return reply

    def call(self, op: str, timeout_s: float = 40.0, **arguments: Any) -> dict[str, Any]:
        self.ask(op, **arguments)
        return self.answer(timeout_s)

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> float:
        """SIGKILL, and return when the kernel has done it: the time of the signal."""
        started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()
        return started

    def close(self) -> None:
        """Hang up; the child then closes what it has, and ends."""
        self._lines.close()
        self._socket.close()

    def end(self, timeout_s: float = 20.0) -> None:
        """Hang up and wait for the child's end."""
        self.close()
        eventually(lambda: not self.alive, timeout_s)

    def fds(self) -> list[str]:
        """What the process has open, without the numbers of what has them."""
        found = []
        for entry in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(re.sub(r"\d+", "#", os.readlink(f"/proc/{self.pid}/fd/{entry}")))
        return sorted(found)

    def memfd_inodes(self) -> list[int]:
        """The memfds that the process has mapped, by inode, once a mapping."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sorted(int(line.split()[4]) for line in lines if "memfd:kvferry" in line)


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until all threads have stopped: the others go on until the one that gets it has its turn."""
    os.kill(pid, signal.SIGSTOP)
    stats = Path(f"/proc/{pid}/task").glob
    eventually(lambda: {path.read_text().rpartition(")")[2].split()[0] for path in stats("*/stat")} == {"T"}, 30)


class Zygote:
    """Forks sides. Close it last."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(60)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serving.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=TESTS,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path)), "OMP_NUM_THREADS": "1"},
            )

    def start(self, kind: str, **arguments: Any) -> Side:
        side = self.begin(kind, **arguments)
        try:
            side.answer()
        except BaseException:
            side.kill()
            raise
        return side

    def begin(self, kind: str, **arguments: Any) -> Side:
        """Start without waiting; the side's first `answer` comes when it has started."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"s"], [theirs.fileno()])
            (pid,) = PID.unpack(self._control.recv(PID.size))
        side = Side(pid, ours)
        side.ask("start", kind=kind, **arguments)
        return side

    def children(self) -> set[int]:
        """The processes that it has forked and that live."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}

    def close(self) -> None:
        self._control.close()
        self._process.wait(30)


class Stage:
    """A server and engines on it, for one test; ends all of them."""

    def __init__(self, zygote: Zygote, folder: Path, **config: Any) -> None:
        self._zygote = zygote
        self.path = str(folder / "kv.sock")
        self.url = f"unix://{self.path}"
        self._config = {"socket_path": self.path, "memory_bytes": 16 << 20, "device": "cpu", **config}
        self._sides: list[Side] = []
        self.server = self.start_server()

    def start_server(self) -> Side:
        self.server = self._zygote.start("server", **self._config)
        self._sides.append(self.server)
        return self.server

    def engine(self, *, register: dict[str, Any] | None = None, kind: str = "engine", **arguments: Any) -> Side:
        """An engine's process, registered (as `register` says) unless that is {}."""
        side = self._zygote.start(kind, **{"url": self.url, **arguments})
        self._sides.append(side)
        if register is None or register:
            side.call("register", **(register or {}))
        return side

    def wait_for_memory(self, side: Side) -> None:
        """Return when all of the server's memory can be stored to."""
        wanted = self._config["memory_bytes"]
        eventually(lambda: side.call("stats")["stats"]["memory_bytes"] >= wanted)

    def close(self) -> None:
        for side in reversed(self._sides):
            side.close()
        deadline = time.monotonic() + 15
        for side in self._sides:
            while side.alive and time.monotonic() < deadline:
                time.sleep(0.002)
            if side.alive:
                os.kill(side.pid, signal.SIGKILL)
                raise TimeoutError(f"process {side.pid} did not end by itself")


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait until `condition` holds; how long that took. Raises TimeoutError."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.001)
    return time.monotonic() - started
