"""Other ways to set the two engines up: right tokens always, KV handed over where it can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import models
from vllm_engine.models import prompt
from vllm_engine.peers import Peers, all_blocks_are_free, connector
from vllm_engine.processes import Engine
from vllm_engine.stage import IS_026, Reference, Stage, Zygote

PROMPTS = [prompt(seed, 300) for seed in range(700, 703)]


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


def metric(engine: Engine, name: str) -> float:
    """One of the counters that vLLM's Prometheus endpoint has, summed over ranks."""
    found: float = engine.call("metrics")["metrics"].get(f"vllm:kvferry_p2p_{name}", 0)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_tensor_parallel_engines(
    stage: Stage, alone: Any, model: Path, senders: int, receivers: int, send_type: str
) -> None:
    """Each rank has its heads; engines of different sizes go together."""
    if IS_026:
        pytest.skip("two ranks on a CPU are tested with the newest release")
    wanted = alone(model, tensor_parallel_size=receivers)
    sides = [{"tensor_parallel_size": size, "disable_log_stats": False} for size in (senders, receivers)]
    peers = Peers(stage, prefill=sides[0], decode=sides[1], send_type=send_type)
    assert peers.generate(PROMPTS)["tokens"] == wanted
    peers.decode.call("settle")
    assert metric(peers.decode, "receives") == len(PROMPTS) * receivers
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
@pytest.mark.parametrize("cache_first", [True, False])
def test_beside_a_cache_server(stage: Stage, reference: Reference, cache_first: bool) -> None:
    """Both as children of a MultiConnector: what the first of them has is loaded, all is stored."""
    stage.serve()
    wanted = reference(PROMPTS)

    def both(role: str) -> dict[str, Any]:
        children = [stage.connector(), connector(role)]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children if cache_first else children[::-1]},
        }

    peers = Peers(stage, prefill={"connector": both("kv_producer")}, decode={"connector": both("kv_consumer")})
    assert peers.generate(PROMPTS)["tokens"] == wanted
    all_blocks_are_free(peers.prefill, peers.decode)
    for _ in range(2):  # there is KV in the server now
        again = peers.generate(PROMPTS)
        assert again["tokens"] == wanted
        all_blocks_are_free(peers.prefill, peers.decode)
    alone = peers.decode.generate(PROMPTS)
    assert (alone["tokens"], alone["cached"]) == (wanted, [256] * 3)
    stage.server.kill()
    assert peers.generate(PROMPTS)["tokens"] == wanted
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_asynchronous_scheduling(stage: Stage, reference: Reference) -> None:
    """A step is scheduled before the one before has ended, as on GPUs."""
    peers = Peers(stage, prefill={"async_scheduling": True}, decode={"async_scheduling": True})
    prompts = [prompt(seed, length) for seed, length in ((710, 700), (711, 33), (712, 300), (713, 2))]
    assert peers.generate(prompts, 40)["tokens"] == reference(prompts, 40)
    assert peers.decode.call("asynchronous")["is"]
    assert peers.counts()["p2p_receives"] == len(prompts)
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_one_engine_of_both_roles_on_either_side(stage: Stage, reference: Reference) -> None:
    """Each prefills for the other at the same time."""
    both = {"connector": connector("kv_both")}
    one = Peers(stage, prefill=both, decode=both)
    other = Peers.of(one.decode, one.prefill)
    asked = [prompt(seed, 300) for seed in range(720, 724)]
    _, first = one.submit(asked[:2])
    _, second = other.submit(asked[2:])
    one.run()
    tokens = one.decode.call("results", ids=first)["tokens"] + other.decode.call("results", ids=second)["tokens"]
    assert tokens == reference(asked)
    assert sum(engine.call("counts")["counts"]["p2p_receives"] for engine in (one.prefill, one.decode)) == 4
    all_blocks_are_free(one.prefill, one.decode)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["deepseek", "gemma"])
def test_models_whose_kv_cannot_be_handed_over(stage: Stage, alone: Any, tmp_path: Path, kind: str) -> None:
    """Latent attention on a CPU, which cannot go on from a prefix; layers in several groups. The log says so."""
    if IS_026 and kind == "deepseek":
        pytest.skip("vLLM 0.26 has no latent attention on CPUs")
    model = getattr(models, kind)(tmp_path / kind)
    wanted = alone(model, max_num_seqs=1)
    engine = stage.engine(model=model, max_num_seqs=1, connector=connector("kv_consumer"))
    params = {"transfer_id": "t", "do_remote_prefill": True, "remote_addresses": ["127.0.0.1:9"]}
    found = engine.generate(PROMPTS, sampling={"extra_args": {"kv_transfer_params": params}})
    assert found["tokens"] == wanted
    assert stage.log().count("KVferry hands over no KV here: ") == 1


def test_mistakes_in_the_configuration_end_the_start(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'send_type'"):
        stage.engine(connector=connector("kv_producer", send_tipe="PUT"))
