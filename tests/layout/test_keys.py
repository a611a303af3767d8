"""Keys: golden values, the same in every process, for every kind of token list."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import KeyChain, KeyContext, chain_hashes, chunk_tokens_for, namespace

GOLDEN_512 = (
    "12de9b38ba3768edac73321923994f04fab6d24a089dd64889b9d55472dae86e"
    "56a45487b2c243300ec8abf3dc04dd50bd34f2a8a006bf53d7187254cd85954c"
)
GOLDEN_CONTEXT = "b3c4d2371e0955d4970ba5b1f263a76dfb15c65b733cd590af641a7553845f59"
GOLDEN_NAMESPACE = "bc5bafb81003eedc65ab1431fc1cdc3b2a95ac04214904d8117cfd77bf0c03a7"
CONTEXT = KeyContext(lora="adapter", salt="pepper", multimodal=("image-1", "image-2"))
PRINT_KEYS = "from kvferry.layout import chain_hashes; print(chain_hashes(list(range(512)), 256).hex())"


def test_golden_vectors() -> None:
    assert chain_hashes(list(range(512)), 256).hex() == GOLDEN_512
    assert chain_hashes(list(range(64)), 64, CONTEXT).hex() == GOLDEN_CONTEXT
    assert namespace("model", b"f" * 32, rank=1, world_size=2, tenant="uid:1000").hex() == GOLDEN_NAMESPACE


@pytest.mark.parametrize("seed", [None, "0", "12345"])
def test_other_processes_make_the_same_keys(seed: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS], env=environment, capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == GOLDEN_512


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(range(512)),
        range(512),
        array("i", range(512)),
        array("q", range(512)),
        np.arange(512),
        np.arange(512, dtype=np.int32),
        np.arange(512, dtype=np.uint16),
        np.arange(1024)[::2] // 2,
        memoryview(array("i", range(512))),
        torch.arange(512),
        torch.arange(512, dtype=torch.int32),
        [np.int64(token) for token in range(512)],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_kind_of_token_list(tokens: Any) -> None:
    assert chain_hashes(tokens, 256).hex() == GOLDEN_512


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 511])
def test_whole_chunks_only(length: int) -> None:
    keys = chain_hashes(list(range(length)), 256)
    assert len(keys) == length // 256 * 32
    assert keys == bytes.fromhex(GOLDEN_512)[: len(keys)]
    assert chain_hashes(np.arange(length), 256) == keys


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200), st.integers(1, 40), st.data())
def test_growing_gives_what_one_call_gives(tokens: list[int], chunk_tokens: int, data: st.DataObject) -> None:
    chain = KeyChain(chunk_tokens)
    while chain.num_tokens < len(tokens):
        step = data.draw(st.integers(1, 50))
        chain.extend(tokens[chain.num_tokens : chain.num_tokens + step])
    assert chain.hashes == chain_hashes(tokens, chunk_tokens)


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=32, max_size=32), st.integers(0, 31))
def test_a_changed_token_changes_its_chunk_and_all_after_it(tokens: list[int], place: int) -> None:
    before = chain_hashes(tokens, 8)
    tokens[place] += 1
    after = chain_hashes(tokens, 8)
    first = place // 8
    assert before[: first * 32] == after[: first * 32]
    assert all(before[at : at + 32] != after[at : at + 32] for at in range(first * 32, 128, 32))


def test_context_and_chunk_size_are_part_of_the_key() -> None:
    tokens = list(range(128))
    contexts = [
        KeyContext(),
        KeyContext(lora="a"),
        KeyContext(salt="a"),
        KeyContext(multimodal=("a",)),
        KeyContext(lora="ab"),
        KeyContext(lora="a", salt="b"),
        KeyContext(multimodal=("a", "b")),
        KeyContext(multimodal=("ab",)),
    ]
    keys = {chain_hashes(tokens, 64, context)[:32] for context in contexts}
    assert len(keys) == len(contexts)
    assert chain_hashes(tokens, 128)[:32] not in keys


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], np.array([2**31]), torch.tensor([2**40])])
def test_tokens_outside_int32(tokens: Any) -> None:
    with pytest.raises(ValueError, match="int32"):
        chain_hashes(tokens, 1)


@pytest.mark.parametrize("tokens", [b"1234", "1234", [1.5], np.zeros(3), np.zeros((2, 2), dtype=np.int32), ["1"]])
def test_what_is_no_list_of_integers(tokens: Any) -> None:
    with pytest.raises(TypeError):
        chain_hashes(tokens, 1)


def test_namespace_keeps_apart() -> None:
    base = {"model": "m", "fingerprint": b"f", "rank": 0, "world_size": 2, "tenant": "t"}
    changed: list[dict[str, Any]] = [
        {},
        {"model": "mf", "fingerprint": b""},
        {"rank": 1},
        {"world_size": 3},
        {"tenant": "u"},
        {"fingerprint": b"g"},
    ]
    spaces = set()
    for change in changed:
        fields: dict[str, Any] = {**base, **change}
        spaces.add(namespace(fields.pop("model"), fields.pop("fingerprint"), **fields))
    assert len(spaces) == len(changed)
    with pytest.raises(ValueError, match="rank 2 of world size 2"):
        namespace("m", b"f", rank=2, world_size=2, tenant="t")


@pytest.mark.parametrize(
    ("block_size", "minimum", "expected"),
    [(16, 64, 64), (64, 64, 64), (128, 64, 128), (48, 64, 96), (400, 256, 400), (544, 256, 544), (1, 64, 64)],
)
def test_chunk_tokens(block_size: int, minimum: int, expected: int) -> None:
    assert chunk_tokens_for(block_size, minimum) == expected


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        chunk_tokens_for(0)
    with pytest.raises(ValueError, match="at least one token"):
        KeyChain(0)
