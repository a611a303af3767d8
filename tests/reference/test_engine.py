"""The engine with a real cache server in another process: reuse changes no bit, and wrong KV shows."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from kvferry.cli.children import ServerProcess
from kvferry.client import CacheClient
from kvferry.errors import DeadlineError, RequestError
from kvferry.reference import EngineConfig, PagedConfig, ReferenceEngine
from reference.small import SMALL_MODEL

CHUNK = 64
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 128, 129, 330]
CONFIG = EngineConfig(SMALL_MODEL, PagedConfig(num_blocks=64))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(pathlib.Path(folder) / "s", 64 << 20, "cpu") as process:
        yield process


@contextlib.contextmanager
def connected(server: ServerProcess, name: str, shuffle_seed: int | None = 0) -> Iterator[ReferenceEngine]:
    engine = ReferenceEngine(dataclasses.replace(CONFIG, shuffle_seed=shuffle_seed))
    with CacheClient(server.url) as client:
        engine.connect(client, name)
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed * 1000 + length)
    return [source.randrange(SMALL_MODEL.vocab_size) for _ in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_with_reuse_are_bit_equal(server: ServerProcess, length: int) -> None:
    tokens = prompt(length)
    with connected(server, f"a{length}") as first, connected(server, f"b{length}", shuffle_seed=5) as second:
        request = first.open(tokens)
        cold = first.prefill(request)
        assert first.store(request) == length - length % CHUNK
        again = second.open(tokens)
        assert second.reuse(again) == (length - 1) // CHUNK * CHUNK
        assert torch.equal(second.prefill(again), cold)


def test_tokens_with_reuse_are_equal_and_with_other_kv_are_not(server: ServerProcess) -> None:
    tokens, other = prompt(300, seed=1), prompt(300, seed=2)
    with connected(server, "writer") as writer, connected(server, "reader", shuffle_seed=8) as reader:
        cold = writer.generate(tokens, 12, store=True)
        writer.generate(other, 12, store=True)
        reused = reader.generate(tokens, 12, reuse=True)
        control = reader.generate(tokens, 12, reuse=True, kv_of=other)
        assert (cold.reused_tokens, reused.reused_tokens, control.reused_tokens) == (0, 256, 256)
        assert reused.tokens == cold.tokens != control.tokens
        assert reader.pool.num_free == CONFIG.paged.num_blocks


def test_a_prompt_that_goes_on_reuses_the_common_part(server: ServerProcess) -> None:
    tokens = prompt(200, seed=3)
    longer = tokens + prompt(100, seed=4)
    with connected(server, "short") as engine:
        engine.generate(tokens, 2, store=True)
        cold = engine.generate(longer, 8)
        reused = engine.generate(longer, 8, reuse=True)
        assert reused.reused_tokens == 192
        assert reused.tokens == cold.tokens


def test_decoded_tokens_are_not_stored(server: ServerProcess) -> None:
    tokens = prompt(100, seed=5)
    with connected(server, "decoder") as engine:
        produced = engine.generate(tokens, 60, store=True).tokens
        assert engine.generate(tokens + produced, 1, reuse=True).reused_tokens == 64


def test_kv_of_other_weights_is_not_found(server: ServerProcess) -> None:
    tokens = prompt(200, seed=6)
    other = dataclasses.replace(CONFIG, model=dataclasses.replace(SMALL_MODEL, seed=1))
    with connected(server, "ours") as ours, CacheClient(server.url) as client:
        ours.generate(tokens, 1, store=True)
        theirs = ReferenceEngine(other)
        theirs.connect(client, "theirs")
        assert theirs.generate(tokens, 1, reuse=True).reused_tokens == 0


def test_shuffled_block_tables_change_no_bit() -> None:
    logits = []
    for seed in (None, 1, 2):
        engine = ReferenceEngine(dataclasses.replace(CONFIG, shuffle_seed=seed))
        logits.append(engine.prefill(engine.open(prompt(250, seed=7))))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


class _LateJob:
    """Does not end in time; `cancel` gives `stopped`, or takes too long as well where that is None."""

    def __init__(self, stopped: bool | None) -> None:
        self._stopped = stopped

    def wait(self, timeout_s: float) -> None:
        raise DeadlineError("still going on")

    def cancel(self, timeout_s: float) -> bool:
        if self._stopped is None:
            raise DeadlineError("no answer to cancel")
        return self._stopped


class _RefusingClient:
    """Promises KV and cannot deliver it, or not in time."""

    def __init__(self, job: _LateJob | None = None) -> None:
        self.released: list[int] = []
        self._job = job

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        pass

    def lookup(self, request_id: str, tokens: list[int]) -> Any:
        return type("Lookup", (), {"tokens": 64, "lease_id": 7})()

    def retrieve(self, lease_id: int, block_ids: list[int]) -> Any:
        if self._job is not None:
            return self._job
        raise RequestError("gone", "the chunks were lost")

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)


def test_a_promise_that_is_not_kept_costs_time_but_no_request() -> None:
    engine, client = ReferenceEngine(CONFIG), _RefusingClient()
    engine.connect(cast(CacheClient, client), "unlucky")
    cold = engine.generate(prompt(130, seed=8), 5)
    unlucky = engine.generate(prompt(130, seed=8), 5, reuse=True)
    assert unlucky.tokens == cold.tokens
    assert (unlucky.reused_tokens, client.released) == (0, [7])
    assert unlucky.reuse_failure is not None
    assert "the chunks were lost" in unlucky.reuse_failure


def test_a_late_retrieve_is_stopped_before_its_blocks_are_written() -> None:
    engine = ReferenceEngine(CONFIG)
    engine.connect(cast(CacheClient, _RefusingClient(_LateJob(stopped=True))), "late")
    generation = engine.generate(prompt(130, seed=8), 5, reuse=True)
    assert generation.reused_tokens == 0
    assert generation.reuse_failure == "still going on"
    engine.connect(cast(CacheClient, _RefusingClient(_LateJob(stopped=False))), "just in time")
    assert engine.generate(prompt(130, seed=8), 5, reuse=True).reused_tokens == 64


def test_blocks_that_may_still_be_written_are_never_given_out_again() -> None:
    engine = ReferenceEngine(CONFIG)
    engine.connect(cast(CacheClient, _RefusingClient(_LateJob(stopped=None))), "stuck")
    with pytest.raises(DeadlineError, match="no answer to cancel"):
        engine.generate(prompt(130, seed=8), 5, reuse=True)
    assert engine.pool.num_free == CONFIG.paged.num_blocks - 9


def test_misuse_is_refused_with_what_to_do() -> None:
    engine = ReferenceEngine(CONFIG)
    with pytest.raises(ValueError, match="at least one token"):
        engine.open([])
    with pytest.raises(MemoryError, match="blocks"):
        engine.open(prompt(5000))
    with pytest.raises(ValueError, match="connect"):
        engine.generate(prompt(10), 1, reuse=True)
    assert engine.pool.num_free == CONFIG.paged.num_blocks
    request = engine.open(prompt(20))
    request.computed = 16
    with pytest.raises(ValueError, match="multiple of 64"):
        engine.prefill(request)
