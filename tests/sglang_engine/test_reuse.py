"""KV outlives the engine that computed it, by either way: the same tokens, out of the cache server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_engine import models
from sglang_engine.models import prompt
from sglang_engine.stage import Stage
from vllm_engine.results import Results

PAGE = 16
ROUTES = ["hicache", "linker"]
full = pytest.mark.full


def restart(stage: Stage, route: dict[str, Any], lengths: list[int], *, page: int = PAGE, ranks: int = 1) -> None:
    """Prompts of those lengths, cold in one engine and again in another after the first was killed."""
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    stage.serve()
    first = stage.engine(**route)
    cold = [first.generate([one]) for one in prompts]
    assert [one["cached"] for one in cold] == [[0]] * len(prompts)
    stage.wait_for_pages(ranks * sum(length // page for length in lengths))
    first.kill()
    second = stage.engine(**route)
    warm = [second.generate([one]) for one in prompts]
    assert [one["tokens"] for one in warm] == [one["tokens"] for one in cold]
    for length, one in zip(lengths, warm, strict=True):
        (cached,) = one["cached"]
        assert cached % page == 0
        assert length - page - 1 <= cached < length
    second.end()


@pytest.mark.parametrize("name", ROUTES)
def test_an_engine_goes_on_with_the_kv_of_one_that_was_killed(stage: Stage, name: str) -> None:
    restart(stage, stage.route(name), [200])


@full
@pytest.mark.parametrize("name", ROUTES)
def test_prompts_around_the_ends_of_pages(stage: Stage, name: str) -> None:
    restart(stage, stage.route(name), [1, 17, 31, 32, 33, 34, 47, 48, 49, 127, 128, 129, 700])


@full
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("page", [1, 8, 64])
def test_pages_of_other_sizes(stage: Stage, name: str, page: int) -> None:
    route = stage.route(name, **({"prefetch_threshold": 1} if name == "hicache" else {}))
    restart(stage, {**route, "page_size": page}, [65, 130, 200], page=page)


@full
@pytest.mark.parametrize("name", ROUTES)
def test_overlapped_scheduling(stage: Stage, name: str) -> None:
    restart(stage, {**stage.route(name), "disable_overlap_schedule": False}, [200, 90, 300])


@full
@pytest.mark.parametrize("name", ROUTES)
def test_two_ranks(stage: Stage, name: str) -> None:
    restart(stage, {**stage.route(name), "tp_size": 2}, [200, 90], ranks=2)


@full
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_every_layout_of_the_host_pool(stage: Stage, layout: str) -> None:
    restart(stage, stage.hicache(layout=layout), [200, 90])


@full
def test_the_shared_allocator_changes_nothing(stage: Stage) -> None:
    restart(stage, stage.hicache(allocator="shm"), [200])


@full
@pytest.mark.parametrize("name", ROUTES)
def test_conversations_and_branches(stage: Stage, name: str) -> None:
    """Turn by turn, and from the middle of an earlier turn on: what was stored part by part is found together."""
    stage.serve()
    engine = stage.engine(**stage.route(name))
    talk = prompt(1, 100)
    turns: list[tuple[list[int], list[int]]] = []
    for turn in range(4):
        answer = engine.generate([talk])["tokens"][0]
        turns.append((talk, answer))
        talk = talk + answer + prompt(10 + turn, 60)
    branch = prompt(1, 100) + prompt(99, 120)
    other = engine.generate([branch])["tokens"][0]
    stage.wait_for_pages(len(turns[-1][0]) // PAGE + 7)
    engine.kill()
    again = stage.engine(**stage.route(name))
    found = again.generate([branch])
    assert found["tokens"][0] == other
    assert found["cached"][0] >= 208
    for asked, answer in reversed(turns):
        found = again.generate([asked])
        assert found["tokens"][0] == answer
        assert found["cached"][0] >= len(asked) - PAGE - 1
        again.call("flush")


@full
@pytest.mark.parametrize("name", ROUTES)
def test_control_kv_of_other_weights_gives_other_tokens(stage: Stage, name: str, tmp_path: Path) -> None:
    """By the same model_id a user says that they are the same. Without it, it is a miss: so equal tokens tell."""
    other = models.llama(tmp_path / "other", seed=9)
    asked = prompt(1, 200)
    stage.serve()
    alone = stage.engine(model=other)
    right = alone.generate([asked])["tokens"]
    alone.end()
    first = stage.engine(**stage.route(name, model_id="the same"))
    first.generate([asked])
    stage.wait_for_pages(12)
    first.end()
    wrong = stage.engine(model=other, **stage.route(name, model_id="the same"))
    found = wrong.generate([asked])
    assert found["cached"] == [192]
    assert found["tokens"] != right
    wrong.end()
    honest = stage.engine(model=other, **stage.route(name))
    found = honest.generate([asked])
    assert (found["cached"], found["tokens"]) == ([0], right)


@full
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"page_size": 32}, {"context_length": 1024}])
def test_what_is_not_the_same_is_a_miss(stage: Stage, name: str, change: dict[str, Any]) -> None:
    asked = prompt(1, 200)
    stage.serve()
    first = stage.engine(**stage.route(name))
    first.generate([asked])
    stage.wait_for_pages(12)
    first.end()
    other = stage.engine(**{**stage.route(name), **change})
    assert other.generate([asked])["cached"] == [0]


@full
def test_another_layout_of_the_host_pool_is_a_miss(stage: Stage) -> None:
    asked = prompt(1, 200)
    stage.serve()
    first = stage.engine(**stage.hicache())
    tokens = first.generate([asked])["tokens"]
    stage.wait_for_pages(12)
    first.end()
    found = stage.engine(**stage.hicache(layout="layer_first")).generate([asked])
    assert (found["cached"], found["tokens"]) == ([0], tokens)


@full
@pytest.mark.parametrize("name", ROUTES)
def test_time_of_a_long_prompt(stage: Stage, name: str, results: Results) -> None:
    """The whole request, of 8 tokens, cold and with KV of the server."""
    stage.serve()
    engine = stage.engine(**stage.route(name), max_total_tokens=8192, chunked_prefill_size=2048)
    engine.generate([prompt(0, 64)])
    cold = engine.generate([prompt(1, 1900)])
    stage.wait_for_pages(118)
    engine.call("flush")
    warm = engine.generate([prompt(1, 1900)])
    assert warm["tokens"] == cold["tokens"]
    assert warm["cached"][0] >= 1880
    results.add(f"sglang_{name}_1900_tokens_cold", cold["seconds"] * 1e3, "ms")
    results.add(f"sglang_{name}_1900_tokens_warm", warm["seconds"] * 1e3, "ms")
