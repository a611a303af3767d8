"""What `kvferry serve --log-format json` tells of sessions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.errors import RequestError
from kvferry.ipc import allocate_shared
from kvferry.layout import chain_hashes
from kvferry.protocol.auth import Token
from kvferry.server.session_log import RateLimit
from serving.process import eventually
from serving.tokens import TOKENS, text_of, token_file

A = TOKENS["a"]
FORMAT = "vllm_flash_attention"


class Served:
    """A server in a process of its own, and its records so far."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        command = [sys.executable, "-m", "kvferry", "serve", "--device", "cpu", "--memory", "16MiB"]
        command += ["--listen", "tcp://:0", "--token-file", token_file(folder), "--log-format", "json"]
        self.process = subprocess.Popen(
            [*command, "--socket", self.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.process.stdout is not None
        (self.tcp_url,) = re.findall(r"tcp://[0-9.:]+", self.process.stdout.readline())

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def records(self, message: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in list(self.lines)]
        return [record for record in found if re.fullmatch(message, record["message"])]

    def wait_for(self, message: str, count: int = 1) -> list[dict[str, Any]]:
        eventually(lambda: len(self.records(message)) >= count)
        return self.records(message)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        finally:
            self.process.kill()
            self._reader.join()
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.close()


def register(client: CacheClient, engine_id: str) -> int:
    cache = allocate_shared((2, 64, 16, 8, 8), torch.float32)
    client.register_kv_caches({"layer": cache}, engine_id=engine_id, model="m", format=FORMAT)
    return cache.nbytes


def test_each_step_of_a_session_is_one_record(served: Served) -> None:
    prompt = list(range(64))
    with CacheClient(served.path, token=text_of(A)) as client:
        nbytes = register(client, "lost")
        client.store(prompt, [0, 1, 2, 3]).wait()
        client.lookup("request", prompt)
        link = client._connection.link()
        assert link is not None
        link.close()
        served.wait_for(r"session \d+ registered a KV cache", 2)  # it comes back,
        eventually(lambda: client.connected)  # and then says that it goes
    _, orderly = served.wait_for(r"session \d+ ended", 2)
    lost, _ = served.records(r"session \d+ ended")
    connected, _ = served.records(r"session \d+ connected")
    registered, _ = served.records(r"session \d+ registered a KV cache")
    for record in (connected, registered, lost):
        assert record["level"] == "info"
        assert record["session"] == connected["session"]
        assert record["tenant"] == f"token:{A.name}"
        assert re.fullmatch("pid [0-9]+", record["client"])
    assert (connected["engine"], connected["rank"], connected["transport"]) == (None, None, "unix")
    for record in (registered, lost, orderly):
        assert (record["engine"], record["rank"]) == ("lost", 0)
    assert registered["held_bytes"] == lost["held_bytes"] == nbytes
    assert orderly["held_bytes"] == 0
    assert 0 <= lost["unmapped_ms"] < 10_000
    assert lost["why"]
    text = "".join(served.lines)
    assert A.secret.decode() not in text
    assert chain_hashes(prompt, 64).hex() not in text


def test_a_refused_cache_is_a_record_with_its_names(served: Served) -> None:
    with CacheClient(served.path) as first, CacheClient(served.path) as second:
        register(first, "taken")
        with pytest.raises(RequestError, match="rank_taken"):
            register(second, "taken")
        (refused,) = served.wait_for(r"session \d+: its KV cache was refused")
    assert (refused["engine"], refused["rank"], refused["code"]) == ("taken", 0, "rank_taken")
    assert "registered by a process that is alive" in refused["why"]


def test_strangers_do_not_fill_the_log(served: Served) -> None:
    wrong = Token("mine-is-the-secret", b"0123456789abcdef")
    for _ in range(12):
        with pytest.raises(RequestError, match="token"):
            CacheClient(served.tcp_url, token=wrong)
    before = len(served.records(r"session \d+ connected"))
    with CacheClient(served.path):
        served.wait_for(r"session \d+ connected", before + 1)
    refused = served.records("a peer was refused")
    assert [record["code"] for record in refused] == ["token"] * 10
    assert "mine-is-the-secret" not in "".join(served.lines)


def test_what_is_left_out_is_counted() -> None:
    limit = RateLimit(2, 10.0)
    assert [limit.passes(now) for now in (0.0, 1.0, 2.0, 3.0, 9.9)] == [0, 0, None, None, None]
    assert [limit.passes(now) for now in (10.0, 10.1, 10.2, 30.0)] == [3, 0, None, 1]
