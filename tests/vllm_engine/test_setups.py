"""Other models and other ways to set vLLM up: right tokens always, reuse where it can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import models
from vllm_engine.models import prompt
from vllm_engine.processes import Engine
from vllm_engine.stage import IS_026, Reference, Stage, Zygote

PROMPTS = [prompt(seed, 300) for seed in range(200, 203)]


@pytest.fixture
def alone(zygote: Zygote, tmp_path: Path) -> Iterator[Any]:
    """The tokens of an engine without KVferry, with another model."""
    engines: list[Engine] = []

    def tokens(model: Path, **arguments: Any) -> list[list[int]]:
        engine = zygote.start(model=str(model), log=tmp_path / "alone.log", **arguments)
        engines.append(engine)
        return Reference(engine)(PROMPTS)

    yield tokens
    for engine in engines:
        engine.end()


@pytest.mark.full
def test_latent_attention_on_a_cpu_is_computed(stage: Stage, alone: Any, tmp_path: Path) -> None:
    """vLLM's own has no prefix cache there, and for what it computes after loaded KV the tokens are others."""
    model = models.deepseek(tmp_path / "deepseek")
    wanted = alone(model, max_num_seqs=1)
    stage.serve()
    engine = stage.engine(model=model, max_num_seqs=1)
    for _ in range(2):
        found = engine.generate(PROMPTS)
        assert (found["tokens"], found["cached"]) == (wanted, [0] * 3)
    assert stage.log().count("KVferry neither stores nor reuses KV here: vLLM's latent attention on CPUs") == 1


@pytest.mark.full
def test_a_model_with_several_groups_is_computed(stage: Stage, alone: Any, tmp_path: Path) -> None:
    """And reused where vLLM keeps its layers in one group."""
    model = models.gemma(tmp_path / "gemma")
    wanted = alone(model)
    stage.serve()
    engine = stage.engine(model=model)
    for _ in range(2):
        found = engine.generate(PROMPTS)
        assert (found["tokens"], found["cached"]) == (wanted, [0] * 3)
    assert "--disable-hybrid-kv-cache-manager" in stage.log()
    assert stage.log().count("KVferry neither stores nor reuses KV here") == 1

    if IS_026:
        return  # which cannot do that on CPUs: "failed to convert the KV cache specs to one unified type"
    engine = stage.engine(model=model, disable_hybrid_kv_cache_manager=True)
    engine.generate(PROMPTS)
    found = engine.generate(PROMPTS)
    assert (found["tokens"], found["cached"]) == (wanted, [256] * 3)


@pytest.mark.full
def test_as_children_of_a_multi_connector(stage: Stage, reference: Reference) -> None:
    """Two servers: both are stored to, the first that has something is loaded from. Statistics go through, too."""
    stage.serve()
    stage.serve()
    wanted = reference(PROMPTS)
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [stage.connector(server=0), stage.connector(server=1)]},
    }
    engine = stage.engine(connector=both, disable_log_stats=False)
    assert engine.generate(PROMPTS)["tokens"] == wanted
    engine.call("settle")
    warm = engine.generate(PROMPTS)
    assert (warm["tokens"], warm["cached"]) == (wanted, [256] * 3)
    stage.server.kill()
    engine.call("settle")
    other = engine.generate(PROMPTS)
    assert (other["tokens"], other["cached"]) == (wanted, [256] * 3)
    assert engine.call("metrics")["metrics"]["vllm:kvferry_hit_tokens"] == 2 * 3 * 256


@pytest.mark.full
def test_statistics(stage: Stage) -> None:
    if IS_026:
        pytest.skip("without its server, vLLM 0.26 drops the counts of steps in which no token came out")
    stage.serve()
    engine = stage.engine(disable_log_stats=False)
    engine.generate(PROMPTS)
    engine.call("settle")
    engine.generate(PROMPTS)
    found = engine.call("metrics")["metrics"]
    wanted = {"lookups": 6, "hit_tokens": 768, "loads": 3, "stores": 3, "chunks_stored": 12, "stores_failed": 0}
    assert {name: found[f"vllm:kvferry_{name}"] for name in wanted} == wanted
    assert "vllm:kvferry_load_seconds" in found  # of which vLLM shows whole ones only here


@pytest.mark.full
def test_two_ranks(stage: Stage, alone: Any, model: Path) -> None:
    """Tensor parallelism: each rank has half of the heads; a hit is what both have."""
    wanted = alone(model, tensor_parallel_size=2)
    stage.serve()
    first = stage.engine(tensor_parallel_size=2)
    cold = first.generate(PROMPTS)
    assert (cold["tokens"], cold["cached"]) == (wanted, [0] * 3)
    warm = first.generate(PROMPTS)
    assert (warm["tokens"], warm["cached"]) == (wanted, [256] * 3)
    first.end()
    second = stage.engine(tensor_parallel_size=2)
    again = second.generate(PROMPTS)
    assert (again["tokens"], again["cached"]) == (wanted, [256] * 3)
    stage.server.kill()
    dead = second.generate(PROMPTS)
    assert (dead["tokens"], dead["cached"]) == (wanted, [0] * 3)


@pytest.mark.full
def test_adapters_keep_apart(stage: Stage, zygote: Zygote, model: Path, tmp_path: Path) -> None:
    """The model itself, an adapter, and another adapter that comes to have the same name."""
    paths = [models.adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    adapters = [None, ["tuned", 1, str(paths[0])], ["tuned", 2, str(paths[1])]]
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_num_seqs": 4}
    alone = zygote.start(model=str(model), log=tmp_path / "alone.log", **settings)
    wanted = [alone.generate(PROMPTS[:1], lora=adapter)["tokens"] for adapter in adapters]
    alone.end()
    assert wanted[0] != wanted[1] != wanted[2]

    stage.serve()
    for cached in (0, 256):  # in another engine the second time
        engine = stage.engine(**settings)
        for adapter, right in zip(adapters, wanted, strict=True):
            found = engine.generate(PROMPTS[:1], lora=adapter)
            assert (found["tokens"], found["cached"]) == (right, [cached])
        engine.end()


@pytest.mark.full
def test_sleeping_and_waking(stage: Stage, reference: Reference) -> None:
    stage.serve()
    engine = stage.engine()
    wanted = reference(PROMPTS)
    engine.generate(PROMPTS)
    engine.call("settle")
    for _ in range(10):
        engine.call("sleep")
        assert stage.server.stats()["mapped_bytes"] == 0
        engine.call("wake")
        found = engine.generate(PROMPTS)
        assert (found["tokens"], found["cached"]) == (wanted, [256] * 3)
        engine.call("settle")


def test_mistakes_in_the_configuration_end_the_start(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'load_timeout_s'"):
        stage.engine(connector=stage.connector(load_timeout=3))
