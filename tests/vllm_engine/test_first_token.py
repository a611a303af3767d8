"""How long the first token takes, cold and with the prompt's KV from the server."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import models
from vllm_engine.models import prompt
from vllm_engine.results import Results
from vllm_engine.stage import Stage

LENGTH, COUNT = 1537, 7


@pytest.mark.full
def test_first_token(stage: Stage, tmp_path: Path, results: Results) -> None:
    """Prompts of 1,537 tokens, one by one, with a model of 8 layers: cold, and in a second engine after a kill."""
    model = models.llama(tmp_path / "larger", hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    settings: dict[str, Any] = {"model": model, "kv_cache_memory_bytes": 256 << 20}
    asked = [prompt(seed, LENGTH) for seed in range(300, 300 + COUNT)]
    warm_up = [prompt(1, LENGTH)]
    stage.serve()

    first = stage.engine(**settings)
    first.generate(warm_up)
    cold = [first.generate([one]) for one in asked]
    first.call("settle")
    first.kill()
    second = stage.engine(**settings)
    second.generate(warm_up)
    warm = [second.generate([one]) for one in asked]

    assert [one["cached"] for one in warm] == [[1536]] * COUNT
    assert [one["tokens"] for one in warm] == [one["tokens"] for one in cold]
    cold_ms, warm_ms = (statistics.median(one["ttft_ms"][0] for one in found) for found in (cold, warm))
    results.add("ttft_cold_1537_tokens", cold_ms, "ms")
    results.add("ttft_warm_1537_tokens", warm_ms, "ms", limit=cold_ms)
    results.add("load_1536_tokens", second.call("load_time")["ms"], "ms")
    assert warm_ms < cold_ms
