"""The connector in the double of TensorRT-LLM's executor, with a real server's process: reuse, restarts, all modes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

from doubles import trt_modes
from doubles.trt_blocks import PoolShape
from doubles.trt_fixtures import Start, wait_for_memory, write_model
from doubles.trt_interface import NEW, OLD
from doubles.trt_requests import Setup, State
from kvferry.client import CacheClient
from kvferry.errors import DeadlineError
from serving.process import Stage, eventually

PROMPT = list(range(1000, 1200))  # 3 chunks of 64, and 8 tokens
V2 = Setup(v2=True, shape=PoolShape(blocks=14, tokens=64))
HALVES = PoolShape(heads=1)
MODES = {
    "plain": Setup(),
    "nothing is kept": Setup(keeps=False),
    "partial reuse": Setup(partial=True),
    "chunked": Setup(max_tokens=48),
    "overlap": Setup(overlap=True),
    "overlap, chunked, graphs, two ranks": Setup(overlap=True, max_tokens=40, graphs=True, num_ranks=2, shape=HALVES),
    "hooks repeated, three blocks of room": Setup(repeats_hooks=True, keeps=False, shape=PoolShape(blocks=9)),
    "V2": V2,
    "V2, chunked": dataclasses.replace(V2, max_tokens=64),
    "V2, chunked, overlap": dataclasses.replace(V2, max_tokens=100, overlap=True),
    "V2, blocks without a page": dataclasses.replace(V2, holes=1),
    "V2, two ranks": dataclasses.replace(V2, num_ranks=2, shape=PoolShape(blocks=14, tokens=64, heads=1)),
}


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 50_000, longest).tolist() for _ in range(2)]
    found = []
    for _ in range(count):
        stem = stems[int(rng.integers(2))]
        cut = int(rng.choice([0, 1, 31, 32, 63, 64, 65, 96, 127, 128, 129, 150]))
        tail = rng.integers(0, 50_000, int(rng.integers(1, 70))).tolist()
        found.append([*stem[:cut], *tail])
    return found


@pytest.mark.parametrize("stub", [OLD, NEW], indirect=True)
def test_what_one_engine_computed_another_loads(start: Start) -> None:
    first = start()
    (request,) = first.run(PROMPT)
    first.close()
    second = start()
    (again,) = second.run(PROMPT)
    assert (request.matched, again.matched) == (0, 192)
    assert again.tokens == request.tokens


@pytest.mark.parametrize("name", MODES)
def test_no_mode_meets_wrong_kv(start: Start, name: str) -> None:
    """The double compares all that is read, and all that should not be written to."""
    asked = prompts(7, 14, 200)
    engines = []
    for _ in range(2):
        engine = start(MODES[name])
        requests = [engine.submit(prompt, max_new=1 + number % 4) for number, prompt in enumerate(asked)]
        engine.finish(*requests)
        engines.append([request.tokens for request in requests])
        assert all(request.state is State.ENDED for request in requests)
        assert len(engine.scheduler._side) == 0
        matched = sum(request.matched for request in requests)
        engine.close()
    assert engines[0] == engines[1]
    assert matched > 0


@pytest.mark.parametrize("name", trt_modes.MODES)
def test_a_second_engine_loads_every_chunk_of_the_first(start: Start, stage: Stage, name: str) -> None:
    """What runs on a GPU, too."""
    trt_modes.check_mode(start, trt_modes.MODES[name], stage.url)


@pytest.mark.parametrize("length", [1, 32, 63, 64, 65, 128, 129, 192])
def test_the_last_token_is_always_computed(start: Start, length: int) -> None:
    """Whole chunks short of it are promised, and no more."""
    for expected in (0, (length - 1) // 64 * 64):
        engine = start(Setup(keeps=False))
        (request,) = engine.run(PROMPT[:length])
        assert request.matched == expected
        engine.close()


def test_what_the_engine_has_itself_is_not_loaded(start: Start) -> None:
    engine = start()
    engine.run(PROMPT)
    (again,) = engine.run(PROMPT)
    assert (again.local, again.matched) == (192, 0)
    engine.close()
    other = start()
    other.run(PROMPT[:70])
    (request,) = other.run(PROMPT)
    assert (request.local, request.matched) == (64, 128)


def test_a_chunk_is_stored_by_the_step_that_completes_it(start: Start) -> None:
    """Others find what a long prompt has computed so far, while it goes on."""
    writer = start(Setup(max_tokens=64))
    going_on = writer.submit(PROMPT)
    client = writer.scheduler._side._promises._client
    for expected in (64, 128, 192):
        writer.step()
        for store in writer.workers[0]._side._stores:
            store.job.wait(10)
        assert client.lookup(f"another {expected}", PROMPT).tokens == expected
    writer.finish(going_on)


def test_requests_that_no_key_can_express(start: Start) -> None:
    """Adapters, and inputs other than tokens, are neither stored nor loaded; salts keep apart."""
    first = start(Setup(keeps=False))
    first.run(PROMPT, lora_task_id=3)
    first.run(PROMPT, multimodal_hashes=[[1] * 8])
    (plain,) = first.run(PROMPT)
    assert plain.matched == 0
    runs: list[tuple[dict[str, Any], int]] = [
        ({"lora_task_id": 3}, 0),
        ({"multimodal_hashes": [[1] * 8]}, 0),
        ({"cache_salt_id": 5}, 0),
        ({"cache_salt_id": 5}, 192),
        ({"cache_salt_id": 6}, 0),
        ({}, 192),
    ]
    for fields, matched in runs:
        (request,) = first.run(PROMPT, **fields)
        assert request.matched == matched, fields


def test_other_models_and_layouts_share_nothing(
    start: Start, model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    start().run(PROMPT)
    folder = tmp_path_factory.mktemp("others")
    others: list[dict[str, Any]] = [
        {"model": write_model(folder / "weights", rope_theta=1e6)},
        {"attn_backend": "FLASHINFER"},
        {"kv_dtype": "bfloat16"},
    ]
    for changes in others:
        (request,) = start(**changes).run(PROMPT)
        assert request.matched == 0, changes
    (request,) = start(Setup(shape=PoolShape(tokens=16))).run(PROMPT)
    assert request.matched == 0
    one_head = write_model(folder / "one head", num_key_value_heads=1)  # of which each of two ranks has a copy
    for num_ranks, matched in ((1, 0), (2, 0), (2, 192), (1, 192)):
        engine = start(Setup(num_ranks=num_ranks, shape=PoolShape(heads=1)), model=one_head)
        assert engine.run(PROMPT)[0].matched == matched, num_ranks
        engine.close()
    (request,) = start(model=model).run(PROMPT)
    assert request.matched == 192


def test_with_a_server_that_hangs_at_the_start_the_engine_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = mock.Mock(side_effect=DeadlineError("no answer within 10 s"))
    monkeypatch.setattr(CacheClient, "register_kv_caches", hangs)
    engine = start(Setup(keeps=False))
    for _ in range(2):
        (request,) = engine.run(PROMPT)
        assert (request.state, request.matched) == (State.ENDED, 0)


def test_without_a_server_the_engine_runs_and_reuses_when_it_comes(start: Start, stage: Stage) -> None:
    engine = start(Setup(keeps=False))
    engine.run(PROMPT)
    stage.server.kill()
    (request,) = engine.run(PROMPT)
    assert request.matched == 0
    stage.start_server()
    wait_for_memory(stage.url)
    eventually(lambda: engine.workers[0]._client.connected and engine.scheduler._side._promises._client.connected)
    engine.run(PROMPT)
    assert engine.run(PROMPT)[0].matched == 192
