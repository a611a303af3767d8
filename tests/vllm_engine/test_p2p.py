"""Prefill in one engine, decode in another: the tokens are those of one engine, and the KV really comes over."""

from __future__ import annotations

from vllm_engine.models import prompt
from vllm_engine.peers import Peers, all_blocks_are_free
from vllm_engine.stage import Reference, Stage

BLOCK = 32
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 700, 1500)


def test_from_prefill_to_decode(stage: Stage, reference: Reference) -> None:
    peers = Peers(stage)
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    found = peers.generate(prompts)
    assert found["tokens"] == reference(prompts)
    counts = peers.counts()
    print(counts)
    assert counts["p2p_receives"] == len(LENGTHS) - 1
    all_blocks_are_free(peers.prefill, peers.decode)
