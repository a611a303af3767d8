"""`kvferry demo` and the reference engine on a GPU."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys

import pytest
import torch

from kvferry.cli.children import ServerProcess
from kvferry.client import CacheClient
from kvferry.reference import EngineConfig, PagedConfig, ReferenceEngine
from reference.small import SMALL_MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def test_the_demo_keeps_its_promise_on_cuda() -> None:
    command = [sys.executable, "-m", "kvferry", "demo", "--device", "cuda", "--prompt-tokens", "2000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout)
    assert (result["backend"], result["wrapper"]) == ("cuda", "raw")
    assert result["tokens_equal"] is True
    assert result["control_equal"] is False
    assert result["reused_tokens"] == 1984
    assert 0 < result["memory_back_ms"] < 500


def test_bf16_logits_with_reuse_are_bit_equal(tmp_path: pathlib.Path) -> None:
    config = EngineConfig(SMALL_MODEL, PagedConfig(num_blocks=256), device="cuda")
    source = random.Random(0)
    with ServerProcess(tmp_path / "s", 64 << 20, "cuda") as server, CacheClient(server.url) as client:
        engine = ReferenceEngine(config)
        engine.connect(client, "engine")
        for length in (1, 63, 64, 65, 129, 500):
            tokens = [source.randrange(SMALL_MODEL.vocab_size) for _ in range(length)]
            first, again = engine.open(tokens), engine.open(tokens)
            cold = engine.prefill(first)
            engine.store(first)
            assert engine.reuse(again) == (length - 1) // 64 * 64
            assert torch.equal(engine.prefill(again), cold)
