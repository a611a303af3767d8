"""KV of prompts from engine to engine: the same bits, whatever the blocks; and what happens where it does not come."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.p2p import P2pConfig
from kvferry.reference import EngineConfig, PagedConfig, ReferenceEngine
from kvferry.reference.transfers import KVTransfers
from reference.small import SMALL_MODEL

TOKENS = [random.Random(0).randrange(SMALL_MODEL.vocab_size) for _ in range(200)]
OTHERS = [random.Random(1).randrange(SMALL_MODEL.vocab_size) for _ in range(200)]
LAST = SMALL_MODEL.num_layers - 1
WAIT_S = 30.0


class Engine(NamedTuple):
    engine: ReferenceEngine
    transfers: KVTransfers

    @property
    def address(self) -> str:
        return self.transfers.p2p.address


def make(seed: int, stack: contextlib.ExitStack) -> Engine:
    engine = ReferenceEngine(EngineConfig(SMALL_MODEL, PagedConfig(num_blocks=64), shuffle_seed=seed))
    config = P2pConfig(carrier="host", kv_buffer_size=1 << 20)
    return Engine(engine, stack.enter_context(KVTransfers(engine, config)))


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    """One that reads prompts, and one that answers."""
    with contextlib.ExitStack() as stack:
        yield make(1, stack), make(2, stack)


def test_an_answer_from_anothers_kv_is_that_of_ones_own(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    expected = decode.transfers.expect("t", TOKENS, 8, WAIT_S)
    request, sending, computed_at = prefill.transfers.prefill("t", TOKENS, decode.address)
    answer = decode.transfers.answer(expected, 8)
    sending.wait(WAIT_S)
    assert request.blocks != expected.request.blocks
    assert (answer.received_tokens, answer.failure) == (192, None)
    assert 0 < computed_at < answer.ended_at < answer.first_token_at
    assert answer.tokens == decode.engine.generate(TOKENS, 8).tokens
    assert decode.engine.pool.num_free == 64


def test_the_bits_that_land_are_those_that_were_computed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    expected = decode.transfers.expect("t", TOKENS, 1, WAIT_S)
    request, sending, _ = prefill.transfers.prefill("t", TOKENS, decode.address)
    expected.receiving.wait(WAIT_S)
    sending.wait(WAIT_S)
    for ours, theirs in zip(decode.engine.cache.layers, prefill.engine.cache.layers, strict=True):
        assert torch.equal(ours[:, expected.request.blocks[:12]], theirs[:, request.blocks])


def test_kv_of_another_prompt_gives_other_tokens(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    own = decode.engine.generate(TOKENS, 8).tokens
    decode.transfers.expect("others", OTHERS, 1, WAIT_S)
    request, sending, _ = prefill.transfers.prefill("others", OTHERS, decode.address)
    sending.wait(WAIT_S)
    expected = decode.transfers.expect("t", TOKENS, 8, WAIT_S)
    prefill.transfers.send_again("t", request, decode.address, SMALL_MODEL.num_layers)
    answer = decode.transfers.answer(expected, 8)
    assert answer.received_tokens == 192
    assert answer.tokens != own


def test_a_sender_that_ends_in_mid_transfer_costs_time_but_no_answer(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    first = decode.transfers.expect("first", TOKENS, 8, WAIT_S)
    request, _, _ = prefill.transfers.prefill("first", TOKENS, decode.address)
    own = decode.transfers.answer(first, 8)
    expected = decode.transfers.expect("t", TOKENS, 8, WAIT_S)
    prefill.transfers.send_again("t", request, decode.address, LAST)
    expected.receiving.wait_layer(LAST - 1, WAIT_S)
    prefill.transfers.close()
    answer = decode.transfers.answer(expected, 8)
    assert (answer.received_tokens, answer.tokens) == (0, own.tokens)
    assert answer.failure is not None
    assert decode.engine.pool.num_free == 64


def test_layers_are_told_in_order_once_their_last_token_has_kv() -> None:
    engine = ReferenceEngine(EngineConfig(SMALL_MODEL, PagedConfig(num_blocks=64)))
    request = engine.open(TOKENS)
    block, slot = request.blocks[199 // 16], 199 % 16
    told = []

    def layer_ready(layer: int) -> None:
        told.append([bool(cache[:, block, slot].any()) for cache in engine.cache.layers])

    engine.prefill(request, layer_ready)
    assert told == [[True, False, False], [True, True, False], [True, True, True]]


def test_what_cannot_be_sent_is_refused(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    with pytest.raises(ValueError, match="more than 64"):
        prefill.transfers.prefill("t", TOKENS[:64], decode.address)
    with pytest.raises(LayoutError, match="cannot move KV caches on cpu"):
        KVTransfers(prefill.engine, P2pConfig(carrier="nccl"))
