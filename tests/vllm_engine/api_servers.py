"""vLLM's OpenAI servers and KVferry's router on loopback, in processes of their own."""

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
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from vllm_engine.api_zygote import PID
from vllm_engine.peers import connector
from vllm_engine.processes import HERE, eventually

START_S = 600
OPTIONS: dict[str, str] = {
    "--host": "127.0.0.1",
    "--dtype": "float32",
    "--block-size": "32",
    "--max-model-len": "2048",
    "--kv-cache-memory-bytes": str(64 << 20),
}
FLAGS = ("--enforce-eager", "--no-enable-prefix-caching")


class ApiZygote:
    """Forks them. Close it last."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(200)
        settings = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path)),
        }
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_engine.api_zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**environ, **settings},
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
        self._process.wait(60)


class Group:
    """A process and all of its children."""

    def __init__(self, zygote: ApiZygote, log: Path, words: list[str]) -> None:
        self.log = log
        self.pid, self.socket = zygote.fork({"log": str(log), "words": words})

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """SIGKILL to all at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        eventually(lambda: not self.alive)
        self.socket.close()


class ApiServer(Group):
    """`vllm serve`; ready when made, or else when `ready` has returned."""

    def __init__(
        self, zygote: ApiZygote, log: Path, model: Path, *, kv_transfer: dict[str, Any] | None = None, port: int = 0
    ) -> None:
        self.port = port or free_port()
        self.kv_transfer = kv_transfer
        self.model = model
        if kv_transfer is not None:
            extra = kv_transfer["kv_connector_extra_config"]
            kv_transfer = {**kv_transfer, "kv_connector_extra_config": {**extra, "http_port": self.port}}
        options = {**OPTIONS, "--model": str(model), "--port": str(self.port)}
        if kv_transfer is not None:
            options["--kv-transfer-config"] = json.dumps(kv_transfer)
        words = ["vllm", *(word for option in options.items() for word in option), *FLAGS]
        super().__init__(zygote, log, words)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> ApiServer:
        """Wait until it answers."""

        def answers() -> bool:
            assert self.alive, self.log.read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, OSError):
                get(self.url, "/health")
                return True
            return False

        eventually(answers, START_S)
        return self

    def metrics(self) -> dict[str, float]:
        """Prometheus's values by name, summed over labels."""
        found: dict[str, float] = {}
        for line in get(self.url, "/metrics").splitlines():
            if not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.split()[-1])
        return found

    def kv_in_use(self) -> float:
        """The part of its blocks that somebody has."""
        return self.metrics()["vllm:kv_cache_usage_perc"]


class RouterProcess(Group):
    """`kvferry route`."""

    def __init__(self, zygote: ApiZygote, log: Path, *flags: str) -> None:
        super().__init__(zygote, log, ["kvferry", "route", "--until-stdin-closes", *flags])
        assert select.select([self.socket], [], [], 60)[0], "the router is not ready"
        line = self.socket.makefile("r").readline()
        found = re.fullmatch(r"ready: (http://\S+), heartbeats at (\S+)\n", line)
        assert found is not None, line + log.read_text()
        self.url, self.heartbeat = found[1], found[2]

    def engines(self) -> tuple[int, int]:
        """Prefill and decode engines that are up."""
        try:
            counts = json.loads(get(self.url, "/health"))["engines"]
        except urllib.error.HTTPError as error:
            counts = json.loads(error.read())["engines"]
        return counts["prefill"], counts["decode"]


class Deployment:
    """A router, so many prefill and so many decode engines; ends all of them."""

    def __init__(self, zygote: ApiZygote, folder: Path, model: Path, prefills: int = 1, decodes: int = 1) -> None:
        self._zygote = zygote
        self._folder = folder
        self.model = model
        self._all: list[Group] = []
        self.router = self.route()
        self.prefills = [self.begin("kv_producer") for _ in range(prefills)]
        self.decodes = [self.begin("kv_consumer") for _ in range(decodes)]

    def await_engines(self) -> None:
        """Until all answer and the router has heard of them."""
        for server in (*self.prefills, *self.decodes):
            server.ready()
        eventually(lambda: self.router.engines() == (len(self.prefills), len(self.decodes)), 30)

    def route(self) -> RouterProcess:
        """A router; one after the first has the first one's addresses."""
        first = next((one for one in self._all if isinstance(one, RouterProcess)), None)
        words = ["--listen", ":0", "--heartbeat", ":0", "--request-timeout", "120"]
        if first is not None:
            words[1::2] = [first.url.removeprefix("http://"), first.heartbeat, "120"]
        self.router = RouterProcess(self._zygote, self._folder / "router.log", *words)
        self._all.append(self.router)
        return self.router

    def begin(self, role: str, port: int = 0) -> ApiServer:
        """Start an engine, and do not wait for it."""
        ip, proxy_port = self.router.heartbeat.split(":")
        config = connector(role, proxy_ip=ip, proxy_port=proxy_port, lease_s=30)
        log = self._folder / f"{role}-{len(self._all)}.log"
        server = ApiServer(self._zygote, log, self.model, kv_transfer=config, port=port)
        self._all.append(server)
        return server

    def single(self) -> ApiServer:
        """An engine that does both, without a connector."""
        server = ApiServer(self._zygote, self._folder / "single.log", self.model)
        self._all.append(server)
        return server

    def close(self) -> None:
        for one in self._all:
            one.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def get(url: str, path: str) -> str:
    with urllib.request.urlopen(f"{url}{path}", timeout=20) as reply:
        return str(reply.read().decode())


def complete(
    url: str, model: Path, tokens: list[int], *, stream: bool = False, max_tokens: int = 16, timeout_s: float = 150
) -> tuple[list[int], float]:
    """A greedy completion of token ids, and how many seconds its first one took, as far as that can be seen."""
    body = {"model": str(model), "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    began = time.monotonic()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", data, kind), timeout=timeout_s
    ) as reply:
        if not stream:
            found: list[int] = json.loads(reply.read())["choices"][0]["token_ids"]
            return found, time.monotonic() - began
        found, first, text = [], 0.0, b""
        for line in reply:
            first = first or time.monotonic() - began
            text = line.strip().removeprefix(b"data: ") or text
            if line.strip() and text != b"[DONE]":
                event = json.loads(text)
                assert "error" not in event, event
                found += event["choices"][0]["token_ids"] if event["choices"] else []
        assert text == b"[DONE]", "the stream was cut off"
        return found, first
