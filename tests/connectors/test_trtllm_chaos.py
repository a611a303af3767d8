"""Random requests, cancelled and paused at random, on servers that hang or die: never wrong KV, nothing left over."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from doubles.trt_blocks import PoolShape
from doubles.trt_executor import EngineDead, FakeTrtExecutor
from doubles.trt_fixtures import Start, thaw, wait_for_memory
from doubles.trt_requests import Request, Setup, State
from serving.process import Stage, eventually, freeze

PROMPT = list(range(1000, 1200))
ALIVE = (State.WAITING, State.CONTEXT, State.GENERATION)


def random_setup(rng: random.Random) -> Setup:
    v2 = rng.random() < 0.4
    num_ranks = rng.choice([1, 2])
    return Setup(
        shape=PoolShape(blocks=14 if v2 else 20, tokens=64 if v2 else 32, heads=2 // num_ranks),
        num_ranks=num_ranks,
        max_tokens=rng.choice([40, 64, 100, 8192]),
        overlap=rng.random() < 0.5,
        keeps=rng.random() < 0.5,
        partial=rng.random() < 0.5,
        graphs=rng.random() < 0.5,
        v2=v2,
        holes=rng.choice([0, 0, 2]) if v2 else 0,
        repeats_hooks=rng.random() < 0.3,
        grows=v2 and rng.random() < 0.5,
        waits=rng.choice([0, 2]) if v2 else 0,
    )


def random_prompt(rng: random.Random) -> list[int]:
    stem = rng.choice([1000, 9000])
    cut = rng.choice([0, 31, 64, 65, 100, 128, 150])
    return [*range(stem, stem + cut), *(rng.randrange(50_000) for _ in range(rng.randrange(1, 60)))]


def meddle(rng: random.Random, engine: FakeTrtExecutor, requests: list[Request]) -> None:
    alive = [request for request in requests if request.state in ALIVE]
    if alive and rng.random() < 0.15:
        engine.cancel(rng.choice(alive), silently=rng.random() < 0.5)
    elif engine.setup.v2 and rng.random() < 0.15:
        running = [request for request in alive if request.state in (State.CONTEXT, State.GENERATION)]
        running = [request for request in running if request not in engine._previous]
        if running:
            engine.pause(rng.choice(running))


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_never_meet_wrong_kv(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    for _ in range(2):
        engine = start(setup)
        requests: list[Request] = []
        for _ in range(45):
            if rng.random() < 0.5:
                requests.append(engine.submit(random_prompt(rng), max_new=rng.randrange(1, 6)))
            engine.step()
            meddle(rng, engine, requests)
        engine.finish(*requests)
        assert all(request.state is State.ENDED for request in requests)
        engine.step()
        for worker in engine.workers:
            assert not worker._side._kept
        engine.close()


def test_a_server_that_hangs_costs_one_wait(start: Start, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_LOOKUP_TIMEOUT_S", "0.5")
    engine = start(Setup(keeps=False))
    engine.run(PROMPT)
    client = engine.scheduler._side._promises._client
    lookup = mock.Mock(side_effect=client.lookup)
    monkeypatch.setattr(client, "lookup", lookup)
    freeze(stage.server.pid)
    try:
        requests = engine.run(*[[seed, *PROMPT] for seed in range(3)])
        assert [request.matched for request in requests] == [0] * 3
        lookup.assert_called_once()  # the others do not ask
    finally:
        thaw(stage.server.pid)


def test_a_server_that_is_killed_at_any_time_costs_no_token(start: Start, stage: Stage) -> None:
    """The engine goes on, or has ended; it never computes with what was not loaded."""
    rng = random.Random(5)
    expected = start().run(PROMPT)[0].tokens
    for _ in range(6):
        engine = start(Setup(keeps=False))
        for _ in range(rng.randrange(3)):
            engine.run(PROMPT[: rng.randrange(60, 200)])
        request = engine.submit(PROMPT)
        for _ in range(rng.randrange(3)):
            engine.step()
        stage.server.kill()
        try:
            engine.finish(request)
            assert request.tokens == expected
        except EngineDead:
            assert request.promised
        engine.close()
        stage.start_server()
        wait_for_memory(stage.url)


def test_the_engine_goes_on_with_the_next_server(start: Start, stage: Stage) -> None:
    engine = start(Setup(keeps=False, num_ranks=2, shape=PoolShape(heads=1)))
    engine.run(PROMPT)
    assert engine.run(PROMPT)[0].matched == 192
    stage.server.kill()
    assert engine.run(PROMPT)[0].matched == 0
    stage.start_server()
    wait_for_memory(stage.url)
    clients = [engine.scheduler._side._promises._client, *(worker._client for worker in engine.workers)]
    eventually(lambda: all(client.connected for client in clients))
    engine.run(PROMPT)
    assert engine.run(PROMPT)[0].matched == 192
