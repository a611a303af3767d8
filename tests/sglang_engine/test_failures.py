"""A server that dies, or hangs, under a real engine: tokens are right, and come in time."""

from __future__ import annotations

import random
import time

import pytest

from sglang_engine.models import prompt
from sglang_engine.stage import Stage
from vllm_engine.processes import Engine, eventually

pytestmark = pytest.mark.full
ROUTES = ["hicache", "linker"]
ASKED, NUM_TOKENS = prompt(1, 400), 16


def started(stage: Stage, name: str) -> tuple[Engine, list[list[int]]]:
    """An engine whose own caches are empty, and the tokens of ASKED, whose KV the server has."""
    stage.serve()
    engine = stage.engine(**stage.route(name))
    tokens = engine.generate([ASKED], NUM_TOKENS)["tokens"]
    stage.wait_for_pages(25)
    engine.call("flush")
    return engine, tokens


def test_a_server_killed_in_the_middle_of_requests_costs_a_recompute(stage: Stage) -> None:
    engine, tokens = started(stage, "hicache")
    source = random.Random(0)
    for _ in range(6):
        engine.send({"op": "generate", "prompts": [ASKED], "max_tokens": NUM_TOKENS})
        time.sleep(source.uniform(0.0, 0.06))  # some moment of the request
        stage.server.kill()
        assert engine.reply(90)["tokens"] == tokens
        stage.server.restart()
        engine.call("flush")
        eventually(lambda: _stores_again(stage, engine), 60)
        engine.call("flush")


def test_a_server_killed_in_the_middle_of_a_load_gives_right_tokens_or_an_error(stage: Stage) -> None:
    """SGLang aborts requests whose promised load has failed."""
    engine, tokens = started(stage, "linker")
    source = random.Random(0)
    for _ in range(6):
        engine.send({"op": "generate", "prompts": [ASKED], "max_tokens": NUM_TOKENS})
        time.sleep(source.uniform(0.0, 0.06))
        stage.server.kill()
        assert _answer(engine) in (tokens, "aborted")
        stage.server.restart()
        eventually(lambda: _stores_again(stage, engine), 60)
        engine.call("flush")


def _answer(engine: Engine) -> list[list[int]] | str:
    """The tokens, or that the request was aborted for its load."""
    try:
        tokens: list[list[int]] = engine.reply(90)["tokens"]
    except RuntimeError as error:
        if "External KV cache load failed" not in str(error):
            raise
        return "aborted"
    return tokens


def _stores_again(stage: Stage, engine: Engine) -> bool:
    """Ask for something else, so that there is something to store."""
    engine.generate([prompt(random.randrange(1 << 30), 40)])
    return stage.server.stats()["chunks"] > 0


@pytest.mark.parametrize("name", ROUTES)
def test_a_server_that_hangs_is_waited_for_once(stage: Stage, name: str) -> None:
    engine, tokens = started(stage, name)
    other = prompt(2, 300)
    other_tokens = engine.generate([other], NUM_TOKENS)["tokens"]
    engine.call("flush")
    stage.server.pause()
    try:
        first = engine.generate([ASKED], NUM_TOKENS)
        assert (first["tokens"], first["cached"]) == (tokens, [0])
        assert first["seconds"] < 15
        second = engine.generate([other], NUM_TOKENS)
        assert second["tokens"] == other_tokens
        assert second["seconds"] < 15
    finally:
        stage.server.resume()

    def hits() -> bool:
        engine.call("flush")
        found = engine.generate([ASKED], NUM_TOKENS)
        assert found["tokens"] == tokens
        return bool(found["cached"][0] == 384)

    eventually(hits, 60)


@pytest.mark.parametrize("name", ROUTES)
def test_an_engine_goes_on_from_before_to_after_its_server(stage: Stage, name: str) -> None:
    """No server at the start; then one; then another."""
    engine = stage.engine(**stage.route(name))
    tokens = engine.generate([ASKED], NUM_TOKENS)["tokens"]
    for _ in range(2):
        engine.call("flush")
        stage.serve()

        def hits() -> bool:
            engine.call("flush")
            found = engine.generate([ASKED], NUM_TOKENS)
            assert found["tokens"] == tokens
            return bool(found["cached"][0] == 384)

        eventually(hits, 90)
        stage.server.kill()


@pytest.mark.parametrize("name", ROUTES)
def test_many_requests_at_a_time_and_little_room(stage: Stage, name: str) -> None:
    """Prompts that share beginnings, more than the server, and the engine, have room for."""
    stage.serve("--memory", "16MiB")
    engine = stage.engine(**stage.route(name))
    prompts = [prompt(seed % 5, 120) + prompt(100 + seed, 80) for seed in range(12)]
    alone = []
    for one in prompts:
        alone += engine.generate([one])["tokens"]
        engine.call("flush")
    for _ in range(2):
        found = engine.generate(prompts)
        assert found["tokens"] == alone
        engine.call("flush")
