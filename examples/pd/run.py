"""One model behind one address, its prompts read by one engine and answered by another, all on this machine.

    pip install vllm '.[route]'                           # in a checkout of KVferry
    python examples/pd/run.py MODEL                       # then ask as it says; Ctrl-C ends all
    python examples/pd/run.py MODEL --ask "The ferry leaves at"
    python examples/pd/run.py MODEL -- --max-model-len 4096   # what follows goes to vLLM's servers

With two GPUs each engine has one, with one GPU they share it, without any they run on the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

START_S = 1800
STOP_S = 30


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def devices() -> list[tuple[dict[str, str], list[str]]]:
    """What each of the two engines is to have in its environment, and among its options."""
    import torch

    count = torch.cuda.device_count()
    if count:
        words = ["--gpu-memory-utilization", "0.4"] if count == 1 else []
        return [({"CUDA_VISIBLE_DEVICES": str(number % count)}, words) for number in range(2)]
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    return [(environ, [])] * 2


def connector(role: str, heartbeat: str, http_port: int) -> str:
    """The --kv-transfer-config of an engine. Without "recompute" a request would fail when its KV does not come."""
    ip, port = heartbeat.split(":")
    return json.dumps(
        {
            "kv_connector": "P2pNcclConnector",
            "kv_connector_module_path": "kvferry.connectors.vllm",
            "kv_role": role,
            "kv_port": 0,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"proxy_ip": ip, "proxy_port": port, "http_port": http_port},
        }
    )


class Processes:
    """What was started; `close` ends all of it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        """A process in a session of its own, whose log is a file."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE if name == "router" else log,
                stderr=log,
                text=True,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    def check(self) -> None:
        """Raises SystemExit where one has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text()
                raise SystemExit(f"{name} ended with code {process.returncode}; the end of its log:\n{log[-2000:]}")

    def close(self) -> None:
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in self._processes.values():
                    process.wait(wait_s)


@contextlib.contextmanager
def deployment(model: str, port: int, more: list[str]) -> Iterator[str]:
    """Both engines and the router; where to ask."""
    processes = Processes(pathlib.Path(tempfile.mkdtemp(prefix="kvferry-pd-")))
    print(f"logs: {processes.folder}")
    try:
        listen = ["--listen", f"127.0.0.1:{port}", "--heartbeat", "127.0.0.1:0"]
        router = processes.start("router", [sys.executable, "-m", "kvferry", "route", *listen], {})
        assert router.stdout is not None
        url, _, heartbeat = router.stdout.readline().strip().removeprefix("ready: ").partition(", heartbeats at ")
        processes.check()
        roles = [("prefill", "kv_producer"), ("decode", "kv_consumer")]
        for (name, role), (environ, options) in zip(roles, devices(), strict=True):
            own = free_port()
            words = ["--model", model, "--host", "127.0.0.1", "--port", str(own), *options, *more]
            words += ["--kv-transfer-config", connector(role, heartbeat, own)]
            server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
            processes.start(name, server, environ)
        print("starting a prefill engine, a decode engine and a router; loading takes a while", flush=True)
        await_engines(url, processes)
        yield url
    finally:
        processes.close()


def await_engines(url: str, processes: Processes) -> None:
    """Until the router has heard of both, and they answer."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        processes.check()
        with contextlib.suppress(urllib.error.URLError, OSError):
            health = ask(url, "/health")
            if health["engines"] == {"prefill": 1, "decode": 1}:
                ask(url, "/v1/models")
                return
        time.sleep(0.5)
    raise SystemExit(f"the engines were not there after {START_S} s; see {processes.folder}")


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=10001, help="where the router answers")
    parser.add_argument("--ask", help="ask this one thing, and end")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, more = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with deployment(words.model, words.port, more) as url:
        body = {"model": words.model, "prompt": words.ask or "The ferry leaves at", "max_tokens": 32}
        if words.ask:
            print(f"answer: {ask(url, '/v1/completions', body)['choices'][0]['text']!r}")
            return
        print(f"ready: ask with\n\n  curl {url}/v1/completions -H 'Content-Type: application/json' \\")
        print(f"    -d '{json.dumps(body)}'\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
