"""Tokens with reuse are those without, and reuse really happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_engine import models
from vllm_engine.models import prompt
from vllm_engine.stage import Reference, Stage

BLOCK, CHUNK = 32, 64
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 700)


def loadable(length: int) -> int:
    """Tokens of a stored prompt that a later request can load."""
    whole = length - length % CHUNK
    return min(whole, length - 1) if whole - 1 >= BLOCK else 0


def test_cold_then_warm_then_in_another_engine_after_a_kill(stage: Stage, reference: Reference) -> None:
    stage.serve()
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    wanted = reference(prompts)

    first = stage.engine()
    cold = first.generate(prompts)
    assert cold["tokens"] == wanted
    assert cold["cached"] == [0] * len(prompts)
    warm = first.generate(prompts)
    assert warm["tokens"] == wanted
    assert warm["cached"] == [loadable(length) for length in LENGTHS]
    first.kill()

    second = stage.engine()
    again = second.generate(prompts)
    assert again["tokens"] == wanted
    assert again["cached"] == [loadable(length) for length in LENGTHS]


def test_the_tokens_depend_on_what_is_loaded(stage: Stage, reference: Reference, tmp_path: Path) -> None:
    """The control: under one name for two models' weights, the second engine loads KV that is wrong for it."""
    stage.serve()
    prompts = [prompt(seed, 300) for seed in range(4)]
    other = models.llama(tmp_path / "other", seed=8)
    lying = stage.connector(model_id="the same for both")
    stage.engine(model=other, connector=lying).generate(prompts)

    victim = stage.engine(connector=lying).generate(prompts)
    assert victim["cached"] == [256] * 4
    assert all(got != right for got, right in zip(victim["tokens"], reference(prompts), strict=True))


@pytest.mark.full
def test_kv_of_another_model_or_layout_is_never_reused(stage: Stage, reference: Reference, tmp_path: Path) -> None:
    stage.serve()
    prompts = [prompt(1, 300)]
    other = models.llama(tmp_path / "other", seed=8)
    stage.engine(model=other).generate(prompts)
    for block_size in (32, 64):  # there is KV of another model; then of this one, with other blocks, too
        found = stage.engine(block_size=block_size).generate(prompts)
        assert (found["cached"], found["tokens"]) == ([0], reference(prompts))


@pytest.mark.full
def test_chunked_prefill_and_a_common_prefix(stage: Stage, reference: Reference) -> None:
    """Prompts longer than one step's tokens; a prompt that goes on as another one began."""
    stage.serve()
    base = prompt(3, 500)
    prompts = [base, base[:200] + prompt(4, 130), prompt(5, 450)]
    wanted = reference(prompts)
    first = stage.engine(max_num_batched_tokens=96, max_num_seqs=4)
    cold = first.generate(prompts[:1])
    assert (cold["tokens"], cold["cached"]) == (wanted[:1], [0])
    mixed = first.generate(prompts)
    assert mixed["tokens"] == wanted
    assert mixed["cached"] == [448, 192, 0]
    second = stage.engine(max_num_batched_tokens=96, max_num_seqs=4)
    warm = second.generate(prompts)
    assert warm["tokens"] == wanted
    assert warm["cached"] == [448, 320, 448]


@pytest.mark.full
def test_together_with_the_engines_own_prefix_cache(stage: Stage, reference: Reference) -> None:
    """What the engine has itself is not loaded, and the rest of a longer stored prompt is."""
    stage.serve()
    long = prompt(6, 640)
    prompts = [[*long[:210], 1], long]
    wanted = reference(prompts)
    stage.engine().generate([long])
    engine = stage.engine(enable_prefix_caching=True)
    first = engine.generate(prompts[:1])
    assert (first["tokens"], first["cached"]) == (wanted[:1], [192])
    second = engine.generate(prompts[1:])  # 192 of its own, 447 of the server's 640
    assert (second["tokens"], second["cached"]) == (wanted[1:], [639])
    third = engine.generate(prompts[1:])  # all but the last block is the engine's own: nothing to load
    assert (third["tokens"], third["cached"]) == (wanted[1:], [608])
    assert engine.call("blocks")["free"] == engine.call("blocks")["all"]


@pytest.mark.full
def test_generated_tokens_are_kept_where_asked(stage: Stage, reference: Reference) -> None:
    stage.serve()
    engine = stage.engine(connector=stage.connector(store_generated=True))
    start = prompt(7, 100)
    answer = engine.generate([start], 60)["tokens"][0]
    turn = start + answer + prompt(8, 20)
    found = engine.generate([turn])
    assert found["cached"] == [128]  # 159 tokens were computed in the first turn: the last one never is
    assert found["tokens"] == reference([turn])


@pytest.mark.full
def test_salts_keep_apart_and_a_reset_forgets(stage: Stage, reference: Reference) -> None:
    stage.serve()
    engine = stage.engine()
    prompts = [prompt(9, 200)]
    engine.generate(prompts, cache_salt="a")
    assert engine.generate(prompts, cache_salt="b")["cached"] == [0]
    assert engine.generate(prompts, cache_salt="a")["cached"] == [192]
    engine.call("settle")
    assert engine.call("reset_cache")["done"]
    after = engine.generate(prompts, cache_salt="a")
    assert (after["cached"], after["tokens"]) == ([0], reference(prompts))
    assert engine.generate(prompts, cache_salt="a")["cached"] == [192]
