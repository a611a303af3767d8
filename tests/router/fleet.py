"""Routers and fake engines in processes of their own, asked from a test."""

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
from typing import Any, TypeVar

import httpx

from router.router_zygote import PID

AnyChild = TypeVar("AnyChild", bound="Child")

TESTS = Path(__file__).resolve().parent.parent
PATH = "/v1/completions"
PLAIN: dict[str, Any] = {"verify": False, "trust_env": False}  # no certificates are loaded: that takes long


class Zygote:
    """Forks them. Close it last."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(60)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.router_zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))},
            )

    def fork(self, orders: dict[str, Any]) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"s"], [theirs.fileno()])
            (pid,) = PID.unpack(self._control.recv(PID.size))
        ours.sendall(json.dumps(orders).encode() + b"\n")
        return pid, ours

    def close(self) -> None:
        self._control.close()
        self._process.wait(30)


class Child:
    """A process, until it ends or is killed."""

    def __init__(self, zygote: Zygote, orders: dict[str, Any]) -> None:
        self.pid, self._socket = zygote.fork(orders)
        self.log = Path(orders["log"])
        try:
            self.word = self._read_line()
        except BaseException:
            self.kill()
            raise

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
        self._socket.close()

    def end(self) -> None:
        """Have it end, and wait for that."""
        self._socket.close()
        eventually(lambda: not self.alive, 20)

    def _read_line(self) -> str:
        if not select.select([self._socket], [], [], 30)[0]:
            raise TimeoutError(f"no word within 30 s; see {self.log}")
        with self._socket.makefile("rb", buffering=0) as lines:
            line = lines.readline().decode().strip()
        if not line:
            raise ConnectionError(f"it ended at its start: {self.log.read_text()}")
        return line


class Engine(Child):
    """A fake engine."""

    def __init__(self, zygote: Zygote, folder: Path, name: str, port: int = 0) -> None:
        orders = {"kind": "engine", "name": name, "port": port, "log": str(folder / f"{name}.log")}
        super().__init__(zygote, orders)
        self.name = name
        self.port = int(self.word)
        self.http = f"127.0.0.1:{self.port}"
        self.kv = f"127.0.0.1:{20_000 + self.port % 10_000}"

    @property
    def flag(self) -> str:
        """As `--prefill` and `--decode` want it."""
        return f"http://{self.http}={self.kv}"

    def tell(self, **orders: Any) -> None:
        """Change how it behaves."""
        httpx.post(f"http://{self.http}/control", json=orders, timeout=20, **PLAIN).raise_for_status()

    def seen(self) -> list[dict[str, Any]]:
        """What it was asked."""
        found: list[dict[str, Any]] = httpx.get(f"http://{self.http}/control", timeout=20, **PLAIN).json()["seen"]
        return found

    def states(self) -> list[str]:
        return [one["state"] for one in self.seen()]

    def beat(self, router: Router, role: str, *, old: bool = False, **more: Any) -> None:
        """Send heartbeats from now on; `more` is in each."""
        one = {
            "type": role,
            "http_address": self.http,
            "zmq_address": self.kv,
            **({} if old else {"kvferry": 1}),
            **more,
        }
        self.tell(beat={"address": router.heartbeat, "maps": [one]})


class Router(Child):
    """`kvferry route`."""

    def __init__(self, zygote: Zygote, folder: Path, *flags: str) -> None:
        orders = {"kind": "router", "arguments": ["--listen", ":0", *flags], "log": str(folder / "router.log")}
        super().__init__(zygote, orders)
        found = re.fullmatch(r"ready: (http://\S+?)(?:, heartbeats at (\S+))?", self.word)
        assert found is not None, self.word
        self.url = found[1]
        self.heartbeat = found[2]

    def post(self, path: str = PATH, *, timeout_s: float = 40.0, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "hi", **fields}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=timeout_s, **PLAIN)

    def stream(self, path: str = PATH, **fields: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        body = {"model": "m", "prompt": "hi", "stream": True, **fields}
        return httpx.stream("POST", self.url + path, json=body, timeout=40, **PLAIN)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **PLAIN, **options)

    def engines(self) -> tuple[int, int]:
        """How many of each kind are up."""
        counts = self.get("/health").json()["engines"]
        return counts["prefill"], counts["decode"]

    def await_engines(self, prefill: int, decode: int) -> None:
        eventually(lambda: self.engines() == (prefill, decode))

    def measure(self, name: str) -> float:
        """A value of /metrics, by its name and labels."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"kvferry_router_{name} "):
                return float(line.split()[-1])
        raise KeyError(name)

    def await_measure(self, name: str, value: float, *, or_more: bool = False) -> None:
        """What is counted when a request has ended is counted a moment after its answer."""
        eventually(lambda: self.measure(name) == value or (or_more and self.measure(name) > value))


class Fleet:
    """What one test starts; ends all of it."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._children: list[Child] = []

    def engine(self, name: str, port: int = 0) -> Engine:
        return self._add(Engine(self._zygote, self._folder, name, port))

    def router(self, *flags: str) -> Router:
        return self._add(Router(self._zygote, self._folder, *flags))

    def pair(self, *flags: str) -> tuple[Engine, Engine, Router]:
        """A prefill engine, a decode engine, and a router that knows both."""
        prefill, decode = self.engine("p"), self.engine("d")
        router = self.router("--prefill", prefill.flag, "--decode", decode.flag, *flags)
        router.await_engines(1, 1)
        return prefill, decode, router

    def close(self) -> None:
        """End all, and fail where one did not by itself."""
        late = []
        for child in reversed(self._children):
            child.signal(signal.SIGCONT)
            try:
                child.end()
            except TimeoutError:
                late.append(child.log.name)
                child.kill()
        assert not late, f"these did not end by themselves: {late}"

    def _add(self, child: AnyChild) -> AnyChild:
        self._children.append(child)
        return child


def texts(response: httpx.Response) -> list[Any]:
    """What the events of a stream hold, as far as they are JSON."""
    events = response.read().decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events), events
    return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def eventually(condition: Callable[[], Any], timeout_s: float = 15.0) -> None:
    """Return when `condition` holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.01)
