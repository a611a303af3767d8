"""Protocol 1 and 2 beside each other: an engine that was not updated yet, and a server that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from kvferry.client import CacheClient
from kvferry.errors import RequestError
from kvferry.ipc import allocate_shared
from kvferry.protocol import messages as v2
from kvferry.protocol.messages import Clear, Error, Hello, Prefetch, Welcome
from protocol import v1_messages as v1
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, link_of, prompt
from serving.process import TESTS, Stage, eventually
from serving.raw import Raw

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path)), "OMP_NUM_THREADS": "1"}


def test_an_engine_of_protocol_1_is_served(stage: Stage) -> None:
    command = [sys.executable, "-m", "protocol.v1_client", stage.path]
    done = subprocess.run(command, cwd=TESTS, env=ENV, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "version": 1,
        "mapped": True,
        "ready": True,
        "stored": 2,
        "tokens": 2 * 64,
        "retrieved": 2,
        "equal": True,
        "pong": True,
        "unregistered": True,
    }


@pytest.fixture
def old_server(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "old")
    command = [sys.executable, "-m", "protocol.v1_server", path]
    with subprocess.Popen(command, cwd=TESTS, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield path
            assert process.poll() is None
        finally:
            process.kill()


def test_a_server_of_protocol_1_is_used(old_server: str) -> None:
    cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
    tokens, blocks = prompt(1, 2 * CHUNK_TOKENS), list(range(2 * CHUNK_BLOCKS))
    with CacheClient(old_server) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format="vllm_flash_attention")
        cache.normal_()
        assert client.store(tokens, blocks).wait(20).num_stored == 2
        found = client.lookup("r", prompt(1, 3 * CHUNK_TOKENS), wait_s=1.0)
        assert (found.tokens, found.coming) == (2 * CHUNK_TOKENS, 0)
        target = [block + 32 for block in blocks]
        job = client.retrieve(found.lease_id, target, stages=2)
        job.wait_stages(1, 20)  # it tells of none: all is there at the end
        assert job.wait(20).num_chunks == 2
        assert torch.equal(cache[:, target], cache[:, blocks])
        client.ping()
        for call in (lambda: client.prefetch(tokens), client.clear):
            with pytest.raises(RequestError, match="version"):
                call()
        client.ping()  # and that cost no session
        before = cache.clone()
        link_of(client)._hang_up("lost by the test")
        eventually(lambda: client.connected)  # without probes: the old server reads where each storage begins
        assert torch.equal(cache, before)
        assert client.lookup("again", tokens).tokens == 2 * CHUNK_TOKENS
        client.unregister()


def test_what_protocol_1_does_not_have_is_refused_in_a_session_of_it(stage: Stage) -> None:
    raw = Raw(stage.path, Hello(1, 1))
    welcome = raw.reply()
    assert isinstance(welcome, Welcome)
    assert welcome.version == 1
    for message in (Prefetch(2, b""), Clear(3)):
        raw.send(message)
        error = raw.reply()
        assert isinstance(error, Error)
        assert (error.seq, error.code) == (message.seq, "version")
    raw.close()


def test_every_message_of_protocol_1_means_the_same_in_2() -> None:
    names = {kind.__name__ for kind in (*v1.Request.__args__, *v1.Reply.__args__)}
    for name in names:
        old, new = getattr(v1, name), getattr(v2, name)
        assert old.__struct_config__.tag == new.__struct_config__.tag
        old_fields = [(field.name, field.default) for field in msgspec.structs.fields(old)]
        new_fields = [(field.name, field.default) for field in msgspec.structs.fields(new)]
        assert new_fields[: len(old_fields)] == old_fields, name
        assert all(default is not msgspec.NODEFAULT for _, default in new_fields[len(old_fields) :]), name
