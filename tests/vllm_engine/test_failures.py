"""Whatever happens to the server, every request gets the tokens that it would get without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vllm_engine.models import prompt
from vllm_engine.processes import Engine, eventually
from vllm_engine.stage import Reference, Stage


def prompts(first: int, count: int = 3, length: int = 300) -> list[list[int]]:
    return [prompt(seed, length) for seed in range(first, first + count)]


def hits_return(engine: Engine, asked: list[list[int]], wanted: list[list[int]]) -> None:
    """Stores and loads work again, with the engine left as it is."""

    def reused() -> bool:
        found = engine.generate(asked)
        assert found["tokens"] == wanted
        return bool(all(found["cached"]))

    eventually(reused, 30)


def all_blocks_are_free(engine: Engine) -> None:
    engine.call("settle")
    blocks = engine.call("blocks")
    assert blocks["free"] == blocks["all"]


@pytest.mark.full
def test_a_server_that_comes_later(stage: Stage, reference: Reference) -> None:
    asked = prompts(20)
    wanted = reference(asked)
    engine = stage.engine()
    alone = engine.generate(asked)
    assert (alone["tokens"], alone["cached"]) == (wanted, [0] * 3)
    stage.serve()
    hits_return(engine, asked, wanted)
    all_blocks_are_free(engine)


def test_a_server_that_is_killed_with_requests_in_flight_and_comes_back(stage: Stage, reference: Reference) -> None:
    """The frozen server has not answered the loads and stores of these requests when it dies."""
    stage.serve()
    engine = stage.engine()
    asked = prompts(30)
    new = prompts(40)
    wanted, wanted_new = reference(asked), reference(new)
    assert engine.generate(asked)["tokens"] == wanted
    engine.call("settle")

    ids = engine.call("submit", prompts=asked + new)["ids"]
    stage.server.freeze_at_load(engine, len(asked))
    engine.call("step", count=20)
    stage.server.kill()
    assert engine.call("run")["done"]
    found = engine.call("results", ids=ids)
    assert found["tokens"] == wanted + wanted_new
    assert set(found["reasons"]) == {"length"}
    assert "a load failed" in stage.log()
    all_blocks_are_free(engine)

    meanwhile = engine.generate(asked)
    assert (meanwhile["tokens"], meanwhile["cached"]) == (wanted, [0] * 3)
    stage.server.restart()
    hits_return(engine, asked, wanted)


@pytest.mark.full
def test_a_server_that_freezes(stage: Stage, reference: Reference) -> None:
    """It answers neither lookups nor loads; after a while requests are computed, and go on as before when it thaws."""
    stage.serve()
    engine = stage.engine(connector=stage.connector(load_timeout_s=0.5))
    asked = prompts(50)
    wanted = reference(asked)
    engine.generate(asked)
    engine.call("settle")
    ids = engine.call("submit", prompts=asked)["ids"]
    stage.server.freeze_at_load(engine, len(asked))
    assert engine.call("run")["done"]
    assert engine.call("results", ids=ids)["tokens"] == wanted
    blocks = engine.call("blocks")
    # The targets of three loads, until it is known that nothing lands there, and what three stores may still read.
    assert 24 <= blocks["all"] - blocks["free"] <= 48
    assert "stay out of use" in stage.log()

    new = prompts(60)
    assert engine.generate(new)["tokens"] == reference(new)
    stage.server.resume()
    # The loads end with the next steps.
    hits_return(engine, asked, wanted)
    all_blocks_are_free(engine)


@pytest.mark.full
def test_requests_aborted_in_mid_load(stage: Stage, reference: Reference) -> None:
    stage.serve()
    engine = stage.engine()
    asked = prompts(70)
    wanted = reference(asked)
    engine.generate(asked)
    engine.call("settle")
    ids = engine.call("submit", prompts=asked)["ids"]
    stage.server.freeze_at_load(engine, len(asked))
    engine.call("abort", ids=ids[:2])
    stage.server.resume()
    assert engine.call("run")["done"]
    assert engine.call("results", ids=ids[2:])["tokens"] == wanted[2:]
    all_blocks_are_free(engine)
    again = engine.generate(asked)
    assert (again["tokens"], again["cached"]) == (wanted, [256] * 3)


def test_a_damaged_chunk_is_recomputed(stage: Stage, reference: Reference) -> None:
    """The server checks what it delivers; vLLM keeps the blocks before the damage and computes the others."""
    stage.serve("--verify-memory")
    engine = stage.engine()
    asked = prompts(80, 1, 400)
    wanted = reference(asked)
    engine.generate(asked)
    engine.call("settle")
    stage.server.damage()
    found = engine.generate(asked)
    assert found["tokens"] == wanted
    assert "a load failed" in stage.log()
    assert "integrity" in stage.log()
    # What was computed has been stored again.
    engine.call("settle")
    again = engine.generate(asked)
    assert (again["tokens"], again["cached"]) == (wanted, [384])


@pytest.mark.full
def test_what_a_failed_load_left_is_not_in_the_engines_own_prefix_cache(stage: Stage, reference: Reference) -> None:
    """The engine has a beginning itself, loads the rest, of which a part fails; later it goes on from all of that."""
    stage.serve("--verify-memory")
    asked = prompts(85, 1, 400)
    wanted = reference(asked)
    stage.engine().generate(asked)
    engine = stage.engine(enable_prefix_caching=True)
    engine.generate([[*asked[0][:100], 1]])
    engine.call("settle")
    stage.server.damage()
    for _ in range(3):
        assert engine.generate(asked)["tokens"] == wanted
    assert "a load failed" in stage.log(1)
    all_blocks_are_free(engine)


@pytest.mark.full
def test_damaged_files_of_the_disk_tier(stage: Stage, reference: Reference) -> None:
    folder = stage.folder / "disk"
    stage.serve("--disk", str(folder), "--disk-size", "64MiB")
    engine = stage.engine()
    asked = prompts(90, 2, 400)
    wanted = reference(asked)
    engine.generate(asked)
    engine.call("settle")
    eventually(lambda: stage.server.stats().get("disk_queue", 0) == 0)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(files) == 12
    stage.server.kill()  # memory is gone, files are left
    for path in files[::3]:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    stage.server.restart()
    eventually(lambda: stage.server.stats().get("engines") == 1)
    found = engine.generate(asked)
    assert found["tokens"] == wanted
    assert sum(found["cached"]) < 768
    engine.call("settle")
    hits_return(engine, asked, wanted)


def test_preemption_by_a_small_cache(stage: Stage, reference: Reference) -> None:
    """Four requests of 10 blocks each grow in a cache of 34: some are preempted with stores going on, and resumed."""
    stage.serve()
    engine = stage.engine(num_gpu_blocks_override=35, max_model_len=512)
    asked = prompts(100, 4, 250)
    wanted = reference(asked, 80)
    for _ in range(2):  # computed, then loaded
        found = engine.generate(asked, 80)
        assert found["tokens"] == wanted
    assert engine.call("preemptions")["count"] > 0
    all_blocks_are_free(engine)


@pytest.mark.full
def test_the_failure_policy_of_vllm(stage: Stage, reference: Reference) -> None:
    """With "fail" a request whose load fails ends with an error, as vLLM says; the log warned of that."""
    stage.serve()
    connector: dict[str, Any] = stage.connector(policy="fail", load_timeout_s=60)
    engine = stage.engine(connector=connector)
    assert re.search(r"kv_load_failure_policy is 'fail'", stage.log())
    asked = prompts(110, 1)
    wanted = reference(asked)
    assert engine.generate(asked)["tokens"] == wanted
    engine.call("settle")
    ids = engine.call("submit", prompts=asked)["ids"]
    stage.server.freeze_at_load(engine, 1)
    stage.server.kill()
    assert engine.call("run")["done"]
    assert engine.call("results", ids=ids)["reasons"] == ["error"]
    assert engine.generate(asked)["tokens"] == wanted
