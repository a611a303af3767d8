"""S5: a retrieve that does not end in time. Its blocks are the engine's again only when no byte can land any more."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from kvferry.client import CacheClient, Job, RetrieveResult
from kvferry.errors import DeadlineError, RequestError, ServerGoneError
from kvferry.ipc import allocate_shared
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
from serving.process import Stage, eventually

NUM_CHUNKS = 4
TOKENS = prompt(1, NUM_CHUNKS * CHUNK_TOKENS)
SOURCE = list(range(NUM_CHUNKS * CHUNK_BLOCKS))
TARGET = list(range(32, 32 + NUM_CHUNKS * CHUNK_BLOCKS))
LAST = TARGET[-CHUNK_BLOCKS:]
TIMEOUT_S = 1.0
MARK = struct.unpack("<f", b"\x55" * 4)[0]


class Engine:
    """A client and its cache, of which `SOURCE` is stored; and a retrieve of it, into `TARGET`, whose end is held."""

    def __init__(self, stage: Stage, stoppable: bool) -> None:
        self.stage = stage
        self.client = CacheClient(stage.url, timeout_s=3.0)
        self.cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
        self.cache.copy_(torch.arange(self.cache.numel(), dtype=torch.float32).view(self.cache.shape))
        self.client.register_kv_caches({"layer": self.cache}, engine_id="e", model="m", format=FORMAT)
        eventually(lambda: self.client.stats()["memory_bytes"] >= 16 << 20)
        self.client.store(TOKENS, SOURCE).wait(10)
        stage.server.call("hold_copy", at=NUM_CHUNKS, stoppable=stoppable)
        lease = self.client.lookup("r", TOKENS).lease_id
        self.job: Job[RetrieveResult] = self.client.retrieve(lease, TARGET, timeout_s=TIMEOUT_S)
        with pytest.raises(DeadlineError):
            self.job.wait(TIMEOUT_S)
        eventually(lambda: bool(stage.server.call("holds")["holds"]))
        assert not self.job.done()

    def use_blocks(self) -> None:
        """Write to the blocks that were to be filled."""
        self.cache[:, TARGET] = MARK

    def check_blocks(self) -> None:
        """After other copies of the same worker, what the engine wrote is there still."""
        lease = self.client.lookup("again", TOKENS).lease_id
        self.client.retrieve(lease, SOURCE).wait(10)
        assert set(self.cache[:, TARGET].numpy().tobytes()) == {0x55}


@pytest.fixture
def engine(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(stage, request.param)
    yield made
    made.client.close()


@pytest.mark.parametrize("engine", [True, False], indirect=True, ids=["stops", "lands"])
def test_blocks_are_free_when_the_copy_is_known_to_have_stopped(engine: Engine, request: pytest.FixtureRequest) -> None:
    job = engine.job
    with pytest.raises(DeadlineError, match="has not confirmed"):
        job.cancel(0.2)
    assert not job.done()
    stopped: list[bool] = []
    waiting = threading.Thread(target=lambda: stopped.append(job.cancel(20)))
    waiting.start()
    engine.client.ping()
    assert stopped == []
    engine.stage.server.call("let_go")
    waiting.join(20)
    assert job.done()
    if "stops" in request.node.name:
        assert stopped == [True]
        assert job.failed_block_ids == tuple(LAST)
        with pytest.raises(RequestError, match="cancelled"):
            job.wait(0)
    else:
        assert stopped == [False]  # all of it is there
        assert torch.equal(engine.cache[:, TARGET], engine.cache[:, SOURCE])
    engine.use_blocks()
    engine.check_blocks()


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_a_lost_connection_frees_no_block_while_the_server_lives(engine: Engine) -> None:
    """The server can take the engine in again only when its thread for copies is free; so it takes some attempts."""
    link = engine.client._connection.link()
    assert link is not None
    link._hang_up("lost by the test")
    with pytest.raises(DeadlineError):
        engine.client.unregister()
    assert not engine.job.done()
    assert engine.client.lookup("other", TOKENS) == (0, 0, 0)
    registration = engine.client._presence.registration
    assert registration is not None
    assert registration.ring.in_use == 0  # other jobs are not kept from theirs
    engine.stage.server.call("let_go")
    assert engine.job.cancel(20) in (True, False)
    engine.use_blocks()
    eventually(lambda: engine.client.connected)
    engine.check_blocks()


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_a_killed_server_frees_all_blocks(engine: Engine) -> None:
    engine.stage.server.kill()
    with pytest.raises(ServerGoneError):
        engine.job.wait(10)
    assert engine.job.failed_block_ids == tuple(TARGET)
    engine.use_blocks()
    eventually(lambda: not engine.stage.server.alive)
    engine.stage.start_server()
    eventually(lambda: engine.client.connected and engine.client.stats()["memory_bytes"] >= 16 << 20)
    engine.client.store(TOKENS, SOURCE).wait(10)
    engine.check_blocks()
