"""The cache server with engines on a GPU: bytes, deaths, hung streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda.memory import memory_info
from serving.engine_side import CHUNK_TOKENS
from serving.process import Stage, Zygote, eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
TOKENS = 3 * CHUNK_TOKENS
BIG_BLOCKS = 65_536  # 1 GiB
BACK_S = 0.5


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, device="cuda", memory_bytes=1200 << 20)
    yield made
    made.close()


def test_what_one_engine_stores_another_retrieves(stage: Stage) -> None:
    first = stage.engine(register={"engine_id": "a"}, device="cuda:0")
    stage.wait_for_memory(first)
    want = first.call("fill", blocks=BLOCKS, seed=1)["digest"]
    assert first.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
    for device in ("cuda:0", "cpu"):
        other = stage.engine(register={"engine_id": f"b {device}"}, device=device)
        found = other.call("lookup", seed=1, num_tokens=TOKENS)
        target = list(range(40, 52))
        before = other.call("digest", blocks=target[:5])["digest"]
        assert other.call("retrieve", lease=found["lease"], blocks=target, skip=5 * 16)["failed"] == []
        assert other.call("digest", blocks=target)["digest"] == before + want[5:]


def test_a_retrieve_in_stages(stage: Stage) -> None:
    """As many as planes at most; what is skipped stays."""
    engine = stage.engine(device="cuda:0")
    stage.wait_for_memory(engine)
    want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
    engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
    target = list(range(40, 52))
    for stages in (2, 3, 4, 256):
        engine.call("wipe")
        before = engine.call("digest", blocks=target[:5])["digest"]
        lease = engine.call("lookup", seed=1, num_tokens=TOKENS)["lease"]
        assert engine.call("retrieve", lease=lease, blocks=target, skip=5 * 16, stages=stages)["failed"] == []
        assert engine.call("digest", blocks=target)["digest"] == before + want[5:]


def test_memory_that_is_checked(zygote: Zygote, tmp_path: Path) -> None:
    """A chunk whose bytes change in pinned memory fails from there on, and nothing of it is written."""
    stage = Stage(zygote, tmp_path, device="cuda", verify_memory=True)
    try:
        engine = stage.engine(device="cuda:0")
        stage.wait_for_memory(engine)
        want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
        engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
        target = list(range(40, 52))
        lease = engine.call("lookup", seed=1, num_tokens=TOKENS)["lease"]
        assert engine.call("retrieve", lease=lease, blocks=target)["failed"] == []
        assert engine.call("digest", blocks=target)["digest"] == want
        lease = engine.call("lookup", seed=1, num_tokens=TOKENS)["lease"]
        stage.server.call("meddle", what="spoil", rank=0, place=2)
        engine.call("wipe")
        before = engine.call("digest", blocks=target[4:])["digest"]
        assert engine.call("retrieve", lease=lease, blocks=target)["failed"] == target[4:]
        assert engine.call("digest", blocks=target)["digest"] == want[:4] + before
        assert engine.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == CHUNK_TOKENS
    finally:
        stage.close()


def test_memory_is_back_after_every_kill(stage: Stage) -> None:
    """Engines of 1 GiB die idle, with 1 GiB in flight, and behind a hung stream."""
    watcher = stage.engine(register={"engine_id": "watcher"}, device="cuda:0")
    stage.wait_for_memory(watcher)
    fds: list[str] | None = None
    for number in range(10):
        eventually(lambda: watcher.call("stats")["stats"]["sessions"] == 1)
        free, _ = memory_info(0)
        fds = fds or stage.server.fds()
        assert stage.server.fds() == fds
        victim = stage.engine(register={"engine_id": "victim"}, device="cuda:0", num_blocks=BIG_BLOCKS)
        assert memory_info(0)[0] < free - (1 << 30)
        if number % 3 == 2:
            victim.call("spin", seconds=20)
        if number % 3:
            victim.call(
                "store",
                seed=number,
                num_tokens=BIG_BLOCKS // 4 * CHUNK_TOKENS,
                blocks=list(range(BIG_BLOCKS)),
                wait=False,
            )
        killed_at = victim.kill()
        eventually(lambda free=free: memory_info(0)[0] >= free - (64 << 20), 5)  # type: ignore[misc]
        assert time.monotonic() - killed_at < BACK_S, f"kill {number}"
    stats = watcher.call("stats")["stats"]
    assert stats["memory_used_bytes"] == stats["chunks"] * 65536


def test_a_hung_stream_holds_up_nobody(stage: Stage) -> None:
    hung = stage.engine(register={"engine_id": "hung"}, device="cuda:0")
    well = stage.engine(register={"engine_id": "well"}, device="cuda:0")
    stage.wait_for_memory(well)
    want = well.call("fill", blocks=BLOCKS, seed=2)["digest"]
    hung.call("spin", seconds=5)
    hung.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
    started = time.monotonic()
    assert well.call("store", seed=2, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
    found = well.call("lookup", seed=2, num_tokens=TOKENS)
    assert well.call("retrieve", lease=found["lease"], blocks=list(range(40, 52)))["failed"] == []
    assert time.monotonic() - started < 3
    assert well.call("digest", blocks=list(range(40, 52)))["digest"] == want
    assert hung.call("job", within_s=0.01)["done"] is False
    assert hung.call("cancel") == {"stopped": True}
    assert well.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == 0


def test_a_rank_comes_back_after_it_unregistered(stage: Stage) -> None:
    engine = stage.engine(device="cuda:0")
    stage.wait_for_memory(engine)
    engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
    for _ in range(3):
        engine.call("unregister")
        assert stage.server.call("mappings")["mapped"] == 0
        engine.call("register")
        assert engine.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == TOKENS
