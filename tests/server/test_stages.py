"""Retrieves in stages: what is told of them, what is in place then, and how they end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import CacheClient, Job, RetrieveResult
from kvferry.errors import DeadlineError, RequestError, ServerGoneError
from kvferry.ipc import allocate_shared
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
from serving.process import Stage, Zygote, eventually

LAYERS, NUM_CHUNKS = 3, 4
TOKENS = prompt(1, NUM_CHUNKS * CHUNK_TOKENS)
SOURCE = list(range(NUM_CHUNKS * CHUNK_BLOCKS))
TARGET = list(range(32, 32 + NUM_CHUNKS * CHUNK_BLOCKS))
IN_STAGE_2 = NUM_CHUNKS + 1  # the first copy of the second stage, where each copies one chunk


class Engine:
    """A client and its cache of three layers, each a plane of K and one of V; `SOURCE` is stored."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = CacheClient(stage.url, timeout_s=5.0)
        self.cache = allocate_shared((LAYERS, 2, 64, BLOCK_SIZE, 8, 8), torch.float32)
        self.cache.copy_(torch.arange(self.cache.numel(), dtype=torch.float32).view(self.cache.shape))
        layers = {f"layer.{number}": layer for number, layer in enumerate(self.cache)}
        self.client.register_kv_caches(layers, engine_id="e", model="m", format=FORMAT)
        eventually(lambda: self.client.stats()["memory_bytes"] >= 16 << 20)
        assert self.client.store(TOKENS, SOURCE).wait(10).num_stored == NUM_CHUNKS
        self.before = self.cache.clone()

    def retrieve(self, stages: int = LAYERS, skip_tokens: int = 0) -> Job[RetrieveResult]:
        lease = self.client.lookup("r", TOKENS).lease_id
        return self.client.retrieve(lease, TARGET, skip_tokens, stages=stages)

    def check_layers(self, num_filled: int, skip_blocks: int = 0) -> None:
        """The first layers have what was stored, the others what they had."""
        for number, (layer, before) in enumerate(zip(self.cache, self.before, strict=True)):
            left = TARGET[: skip_blocks if number < num_filled else None]
            assert torch.equal(layer[:, left], before[:, left])
            filled = slice(len(left), None)
            assert torch.equal(layer[:, TARGET[filled]], before[:, SOURCE[filled]])

    def num_told(self, job: Job[RetrieveResult]) -> int:
        """Of how many stages the server has told up to now."""
        self.client.ping()
        return job._stages_done


@pytest.fixture
def engine(stage: Stage) -> Iterator[Engine]:
    made = Engine(stage)
    yield made
    made.client.close()


def hold(engine: Engine, at: int = IN_STAGE_2, *, stoppable: bool = True) -> None:
    engine.stage.server.call("hold_copy", at=at, stoppable=stoppable)


def wait_for_hold(engine: Engine) -> None:
    eventually(lambda: bool(engine.stage.server.call("holds")["holds"]))


@pytest.mark.parametrize("in_place", range(LAYERS))
def test_the_first_layers_are_there_while_the_others_are_still_coming(engine: Engine, in_place: int) -> None:
    hold(engine, in_place * NUM_CHUNKS + 1)
    job = engine.retrieve()
    for count in range(in_place + 1):
        job.wait_stages(count, 10)
    with pytest.raises(DeadlineError, match=f"stage {in_place + 1} of 3 is not in place after 0.1 s"):
        job.wait_stages(in_place + 1, 0.1)
    assert not job.done()
    wait_for_hold(engine)
    engine.check_layers(in_place)
    engine.stage.server.call("let_go")
    job.wait_stages(LAYERS, 10)
    assert job.done()
    assert job.wait(0).num_chunks == NUM_CHUNKS
    engine.check_layers(LAYERS)
    assert engine.client.stats()["leases"] == 0


@pytest.mark.parametrize(("stages", "skip_blocks"), [(1, 0), (2, 5), (3, 3), (6, 16), (100, 4)])
def test_all_is_there_in_the_end(engine: Engine, stages: int, skip_blocks: int) -> None:
    job = engine.retrieve(stages, skip_blocks * BLOCK_SIZE)
    assert job.stages == min(stages, 2 * LAYERS)
    for count in range(1, job.stages + 1):
        job.wait_stages(count, 10)
    assert job.wait(10).num_chunks == NUM_CHUNKS
    engine.check_layers(LAYERS, skip_blocks)
    stats = engine.client.stats()
    assert stats["bytes_retrieved"] == stats["bytes_stored"]


def test_what_has_no_stages_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="in 0 stages"):
        engine.retrieve(0)
    assert engine.retrieve(1).wait(10).num_chunks == NUM_CHUNKS


def test_a_cancelled_one_has_no_whole_chunk(engine: Engine) -> None:
    hold(engine, IN_STAGE_2 + 1)
    job = engine.retrieve()
    job.wait_stages(1, 10)
    wait_for_hold(engine)
    stopped: list[bool] = []
    waiting = threading.Thread(target=lambda: stopped.append(job.cancel(20)))
    waiting.start()
    engine.client.ping()
    engine.stage.server.call("let_go")
    waiting.join(20)
    assert stopped == [True]
    assert job.failed_block_ids == tuple(TARGET)
    for wait in (job.wait, lambda: job.wait_stages(1, 0)):
        with pytest.raises(RequestError, match="cancelled"):
            wait()
    engine.cache[:, :, TARGET] = -1.0
    assert engine.retrieve().wait(10).num_chunks == NUM_CHUNKS
    engine.check_layers(LAYERS)


def test_a_killed_server_fails_what_was_still_coming(engine: Engine) -> None:
    hold(engine)
    job = engine.retrieve()
    job.wait_stages(1, 10)
    wait_for_hold(engine)
    engine.check_layers(1)
    engine.stage.server.kill()
    with pytest.raises(ServerGoneError):
        job.wait_stages(2, 20)
    assert job.done()
    assert job.failed_block_ids == tuple(TARGET)


def test_a_connection_lost_between_stages_leaves_nothing(engine: Engine) -> None:
    """Nobody may be there to be told of the stage that lands."""
    hold(engine, IN_STAGE_2, stoppable=False)
    job = engine.retrieve()
    wait_for_hold(engine)
    link = engine.client._connection.link()
    assert link is not None
    link._hang_up("lost by the test")
    engine.stage.server.call("let_go")
    try:
        job.wait_stages(LAYERS, 20)
    except (RequestError, ServerGoneError):
        assert job.failed_block_ids == tuple(TARGET)
    else:  # it was done before the server noticed
        engine.check_layers(LAYERS)
    eventually(lambda: engine.client.connected)
    stats = engine.client.stats()
    assert (stats["sessions"], stats["leases"]) == (1, 0)


def test_no_more_is_told_once_it_cannot_end_well(engine: Engine) -> None:
    """Another rank has found that the third chunk is lost: what is in place of it must not be used."""
    hold(engine, IN_STAGE_2 + NUM_CHUNKS - 1)  # the last chunk of the second stage
    job = engine.retrieve()
    job.wait_stages(1, 10)
    wait_for_hold(engine)
    engine.stage.server.call("meddle", what="lose", rank=0, place=3)
    engine.stage.server.call("let_go")
    with pytest.raises(RequestError, match="cut"):
        job.wait(10)
    assert engine.num_told(job) == 1
    assert job.failed_block_ids == tuple(TARGET[2 * CHUNK_BLOCKS :])


@pytest.mark.parametrize("place", range(1, NUM_CHUNKS + 1))
def test_a_damaged_chunk_is_found_before_anything_is_told(zygote: Zygote, tmp_path: Path, place: int) -> None:
    """And it is the one that is lost."""
    stage = Stage(zygote, tmp_path, verify_memory=True)
    engine = Engine(stage)
    with contextlib.closing(stage), engine.client:
        assert engine.retrieve().wait(10).num_chunks == NUM_CHUNKS
        engine.cache.copy_(engine.before)
        lease = engine.client.lookup("r", TOKENS).lease_id
        stage.server.call("meddle", what="spoil", rank=0, place=place)
        job = engine.client.retrieve(lease, TARGET, stages=LAYERS)
        with pytest.raises(RequestError, match="checksum"):
            job.wait(10)
        assert engine.num_told(job) == 0
        assert job.failed_block_ids == tuple(TARGET)
        assert engine.client.lookup("again", TOKENS).tokens == (place - 1) * CHUNK_TOKENS
        spoilt = TARGET[(place - 1) * CHUNK_BLOCKS : place * CHUNK_BLOCKS]
        assert torch.equal(engine.cache[:, :, spoilt], engine.before[:, :, spoilt])
