"""Kinds of requests and ways to schedule them: right tokens, and reuse where it may be."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_engine.models import prompt
from vllm_engine.stage import Reference, Stage

PROMPTS = [prompt(seed, 300) for seed in range(500, 503)]


@pytest.mark.full
def test_asynchronous_scheduling(stage: Stage, reference: Reference) -> None:
    """vLLM's default on GPUs: a step is scheduled while the one before still computes, with tokens not known yet.

    Chunked prefill, a cache too small for all requests, generated tokens kept; computed, then loaded.
    """
    stage.serve()
    arguments: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
    arguments |= {"num_gpu_blocks_override": 35, "max_model_len": 512, "async_scheduling": True}
    engine = stage.engine(connector=stage.connector(store_generated=True), **arguments)
    assert engine.call("asynchronous")["is"]
    asked = [prompt(seed, 250) for seed in range(510, 514)]
    wanted = reference(asked, 80)
    for cached in (False, True):
        found = engine.generate(asked, 80)
        assert found["tokens"] == wanted
        assert all(found["cached"]) is cached
        engine.call("settle")
    assert engine.call("preemptions")["count"] > 0
    blocks = engine.call("blocks")
    assert blocks["free"] == blocks["all"]
    turn = [asked[0] + wanted[0] + prompt(9, 20)]
    found = engine.generate(turn)
    assert (found["tokens"], found["cached"]) == (reference(turn), [320])


@pytest.mark.full
def test_several_answers_to_one_prompt(stage: Stage, reference: Reference) -> None:
    """Each is a request of its own to the scheduler."""
    stage.serve()
    only_the_best = {"n": 3, "temperature": 1, "top_k": 1}  # vLLM allows greedy answers only one by one
    engine = stage.engine()
    wanted = reference(PROMPTS)
    for cached in (0, 256):
        ids = engine.call("submit", prompts=PROMPTS, sampling=only_the_best)["ids"]
        assert engine.call("run")["done"]
        found = engine.call("results", ids=ids)
        assert found["all_tokens"] == [[one] * 3 for one in wanted]
        assert found["cached"] == [cached] * 3
        engine.call("settle")


@pytest.mark.full
def test_a_request_that_may_not_read_caches_is_computed_and_stored(stage: Stage, reference: Reference) -> None:
    """Log probabilities of the prompt need all of it to be computed."""
    stage.serve()
    engine = stage.engine()
    wanted = reference(PROMPTS)
    for sampling, cached in (({"prompt_logprobs": 1}, 0), ({"prompt_logprobs": 1}, 0), ({}, 256)):
        ids = engine.call("submit", prompts=PROMPTS, sampling=sampling)["ids"]
        assert engine.call("run")["done"]
        found = engine.call("results", ids=ids)
        assert (found["tokens"], found["cached"]) == (wanted, [cached] * 3)
        engine.call("settle")


@pytest.mark.full
def test_priorities(stage: Stage, reference: Reference) -> None:
    """Important requests preempt the others in a small cache; both kinds load what there is."""
    stage.serve()
    engine = stage.engine(scheduling_policy="priority", num_gpu_blocks_override=35, max_model_len=512)
    asked = [prompt(seed, 250) for seed in range(520, 524)]
    wanted = reference(asked, 80)
    for _ in range(2):
        early = engine.call("submit", prompts=asked[:2], max_tokens=80, priorities=[5, 4])["ids"]
        engine.call("step", count=20)
        late = engine.call("submit", prompts=asked[2:], max_tokens=80, priorities=[0, 1])["ids"]
        assert engine.call("run")["done"]
        found = engine.call("results", ids=early + late)
        assert found["tokens"] == wanted
        engine.call("settle")
    assert found["cached"] == [192] * 4
    assert engine.call("preemptions")["count"] > 0


@pytest.mark.full
def test_drafts_that_may_be_rejected(stage: Stage, reference: Reference) -> None:
    """Speculative decoding counts drafts as computed; only what was accepted is stored."""
    stage.serve()
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    settings: dict[str, Any] = {"speculative_config": drafts, "connector": stage.connector(store_generated=True)}
    start = [prompt(530, 40) * 3]
    first = stage.engine(**settings)
    cold = first.generate(start, 100)
    assert cold["tokens"] == reference(start, 100)
    first.call("settle")
    first.kill()
    turn = [start[0] + cold["tokens"][0] + prompt(531, 20)]
    found = stage.engine(**settings).generate(turn)
    assert (found["tokens"], found["cached"]) == (reference(turn), [192])
