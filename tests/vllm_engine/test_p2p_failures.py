"""Whatever happens between the two engines, every request gets its tokens, and every block comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vllm_engine.models import prompt
from vllm_engine.peers import Peers, all_blocks_are_free, submit
from vllm_engine.processes import Engine, eventually
from vllm_engine.stage import Reference, Stage

CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4}


def waits_for_kv(engine: Engine, count: int) -> None:
    """Step the engine until so many requests have begun to wait for their KV."""

    def begun() -> bool:
        engine.call("step")
        return bool(engine.call("receiving")["count"] == count)

    eventually(begun)


def test_the_prefill_engine_is_killed_in_the_middle_of_prompts(stage: Stage, reference: Reference) -> None:
    """One is computed, one half, one has not begun: the decode engine computes what has not come, at once."""
    peers = Peers(stage, prefill=CHUNKED, lease_s=300)
    asked = [prompt(seed, 300) for seed in (600, 601, 602)]
    _, names = peers.submit(asked)
    waits_for_kv(peers.decode, len(asked))
    peers.prefill.call("step", count=4)  # 300 tokens take 4 steps
    peers.prefill.kill()
    began = time.monotonic()
    assert peers.decode.call("run")["done"]
    assert time.monotonic() - began < 30
    assert peers.decode.call("results", ids=names)["tokens"] == reference(asked)
    all_blocks_are_free(peers.decode)


@pytest.mark.full
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_the_decode_engine_is_killed(stage: Stage, reference: Reference, send_type: str) -> None:
    """Before it has taken anything; the prefill engine's blocks come back, and it serves another."""
    peers = Peers(stage, send_type=send_type, lease_s=3)
    asked = [prompt(seed, 300) for seed in (610, 611)]
    peers.submit(asked)
    if send_type == "PUT_ASYNC":
        waits_for_kv(peers.decode, len(asked))
    peers.decode.kill()
    peers.prefill.call("run")
    all_blocks_are_free(peers.prefill)
    replaced = Peers.beside(stage, peers.prefill, send_type=send_type)
    assert replaced.generate(asked)["tokens"] == reference(asked)
    assert replaced.decode.call("counts")["counts"]["p2p_receives"] == 2


@pytest.mark.full
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_aborted_on_the_prefill_side(stage: Stage, reference: Reference, send_type: str) -> None:
    """Before its first step, and between two: the decode engine is told at once, and computes."""
    peers = Peers(stage, prefill=CHUNKED, send_type=send_type, lease_s=300)
    asked = [prompt(seed, 300) for seed in (620, 621)]
    first, names = peers.submit(asked)
    waits_for_kv(peers.decode, len(asked))
    peers.prefill.call("step", count=2)
    peers.prefill.call("abort", ids=first)
    peers.prefill.call("settle")
    assert peers.decode.call("run")["done"]
    assert peers.decode.call("results", ids=names)["tokens"] == reference(asked)
    assert peers.decode.call("counts")["counts"]["p2p_receives_failed"] == 2
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("when", ["before", "waiting", "after"])
def test_aborted_on_the_decode_side(stage: Stage, send_type: str, when: str) -> None:
    """Before it has blocks, while it waits, after the KV was sent: the prefill engine's blocks are soon free."""
    peers = Peers(stage, send_type=send_type, lease_s=300, kv_buffer_size=0)
    asked = [prompt(seed, 300) for seed in (630, 631)]
    _, names = peers.submit(asked)
    if when == "waiting":
        waits_for_kv(peers.decode, len(asked))
    if when == "after":
        peers.prefill.call("run")
    peers.decode.call("abort", ids=names)
    peers.decode.call("settle")
    peers.prefill.call("run")
    began = time.monotonic()
    all_blocks_are_free(peers.prefill, peers.decode)
    assert time.monotonic() - began < 15  # of 300
    alone = peers.generate(asked)
    assert len(alone["tokens"]) == 2


@pytest.mark.full
def test_a_request_that_nobody_sends_kv_for(stage: Stage, reference: Reference) -> None:
    """The wait has a deadline, and it holds up no other request."""
    peers = Peers(stage, lease_s=3)
    asked = [prompt(640, 300), prompt(641, 300)]
    _, to_decode = peers.params()
    names = submit(peers.decode, asked[0], 16, to_decode)
    waits_for_kv(peers.decode, 1)
    other = peers.generate(asked[1:])
    assert other["tokens"] == reference(asked[1:])
    assert peers.decode.call("run")["done"]
    assert peers.decode.call("results", ids=names)["tokens"] == reference(asked[:1])
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_preemption_on_the_decode_side(stage: Stage, reference: Reference) -> None:
    """Requests of 8 blocks grow in a cache of 34: some are preempted with all their KV, and computed then."""
    peers = Peers(stage, decode={"num_gpu_blocks_override": 35, "max_model_len": 512})
    asked = [prompt(seed, 250) for seed in range(650, 654)]
    found = peers.generate(asked, 80)
    assert found["tokens"] == reference(asked, 80)
    assert peers.decode.call("preemptions")["count"] > 0
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_preemption_on_the_prefill_side(stage: Stage, reference: Reference) -> None:
    """Three long answers need 24 of 22 blocks; prompts are preempted between chunks, or wait, and come over whole."""
    tight = {"num_gpu_blocks_override": 23, "max_model_len": 512, **CHUNKED}
    peers = Peers(stage, prefill=tight, send_type="GET")
    long = [prompt(seed, 150) for seed in (660, 661, 662)]
    alone = peers.prefill.call("submit", prompts=long, max_tokens=100)["ids"]
    peers.prefill.call("step", count=11)
    asked = [prompt(seed, 200) for seed in (663, 664)]
    found = peers.generate(asked)
    assert found["tokens"] == reference(asked)
    assert peers.prefill.call("preemptions")["count"] > 0
    assert peers.counts()["p2p_receives"] == len(asked)
    assert peers.prefill.call("results", ids=alone)["tokens"] == reference(long, 100)
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_engines_with_other_models_exchange_nothing(stage: Stage, reference: Reference) -> None:
    """They are told so when they meet; the decode engine computes."""
    peers = Peers(stage, lease_s=3)
    differs: dict[str, Any] = {"model_id": "another"}
    other = Peers.beside(stage, peers.prefill, lease_s=3, **differs)
    asked = [prompt(670, 300)]
    assert other.generate(asked)["tokens"] == reference(asked)
    assert other.decode.call("counts")["counts"]["p2p_receives_failed"] == 1
    assert "another/" in stage.log(0)
    all_blocks_are_free(peers.prefill, other.decode)
