"""Fixtures over the double of TensorRT-LLM; a conftest imports them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from doubles.trt_executor import FakeTrtExecutor, MakePool
from doubles.trt_interface import NEW, Stub, installed
from doubles.trt_memory import host_memory, new_pool
from doubles.trt_requests import Setup, llm_args
from kvferry.client import CacheClient
from serving.process import Stage, eventually

Start = Callable[..., FakeTrtExecutor]


def write_model(folder: Path, **changes: Any) -> str:
    """A checkpoint with the sizes of `PoolShape`'s defaults."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "head_dim": 4,
        **changes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    return str(folder)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    """The newer release, unless a test asks for another."""
    with installed(getattr(request, "param", NEW)) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model")


def wait_for_memory(url: str, memory_bytes: int = 16 << 20) -> None:
    """Return when the server has all of its memory: before, it may skip what is to be stored."""
    with CacheClient(url) as client:
        eventually(lambda: client.stats()["memory_bytes"] >= memory_bytes)


@contextlib.contextmanager
def starting(stub: Stub, model: str, url: str) -> Iterator[Start]:
    """Starts engines on a server, with our connector, or with `worker` or `scheduler` in its place; ends them."""
    with contextlib.ExitStack() as undo:
        patient = {"LOOKUP_TIMEOUT_S": "20", "LOAD_TIMEOUT_S": "20"}  # machines may be busy
        variables = {f"KVFERRY_TRTLLM_{name}": value for name, value in {"URL": url, **patient}.items()}
        undo.enter_context(mock.patch.dict(os.environ, variables))

        def make(
            setup: Setup | None = None,
            *,
            worker: Any = None,
            scheduler: Any = None,
            make_pool: MakePool = new_pool,
            **changes: Any,
        ) -> FakeTrtExecutor:
            from kvferry.connectors import trtllm

            setup = setup or Setup()
            worker = worker or trtllm.KVFerryWorker
            if setup.v2 and make_pool is new_pool:
                worker = type("HostWorker", (worker,), {"memory_at": staticmethod(host_memory)})
            args = llm_args(changes.pop("model", model), setup, **changes)
            made = FakeTrtExecutor(stub, scheduler or trtllm.KVFerryScheduler, worker, args, setup, make_pool=make_pool)
            undo.callback(made.close)
            return made

        yield make


@pytest.fixture
def start(stub: Stub, model: str, stage: Stage) -> Iterator[Start]:
    """Starts engines on the stage's server."""
    wait_for_memory(stage.url)
    with starting(stub, model, stage.url) as make:
        yield make
