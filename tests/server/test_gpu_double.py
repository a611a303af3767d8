"""The server's GPU side over the driver's double: handles, mappings, staging, pinned memory; no GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_TOKENS
from serving.process import SideError, Stage, Zygote, eventually

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
TOKENS = 3 * CHUNK_TOKENS


@pytest.fixture
def gpu_stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, device="cuda", double=True)
    yield made
    made.close()


def test_engines_on_gpus_and_on_the_host_share_a_server(gpu_stage: Stage) -> None:
    first = gpu_stage.engine(register={"engine_id": "a"}, device="double")
    gpu_stage.wait_for_memory(first)
    want = first.call("fill", blocks=BLOCKS, seed=1)["digest"]
    assert first.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
    for device in ("double", "cpu"):
        other = gpu_stage.engine(register={"engine_id": f"b {device}"}, device=device)
        found = other.call("lookup", seed=1, num_tokens=TOKENS)
        assert found["tokens"] == TOKENS
        target = list(range(40, 52))
        assert other.call("retrieve", lease=found["lease"], blocks=target)["failed"] == []
        assert other.call("digest", blocks=target)["digest"] == want


def test_a_retrieve_in_stages(gpu_stage: Stage) -> None:
    """As many as planes at most; what is skipped stays."""
    engine = gpu_stage.engine(device="double")
    gpu_stage.wait_for_memory(engine)
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
    stage = Stage(zygote, tmp_path, device="cuda", double=True, verify_memory=True)
    try:
        engine = stage.engine(device="double")
        stage.wait_for_memory(engine)
        want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
        engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
        lease = engine.call("lookup", seed=1, num_tokens=TOKENS)["lease"]
        stage.server.call("meddle", what="spoil", rank=0, place=3)
        engine.call("wipe")
        target = list(range(40, 52))
        before = engine.call("digest", blocks=target[8:])["digest"]
        assert engine.call("retrieve", lease=lease, blocks=target)["failed"] == target[8:]
        assert engine.call("digest", blocks=target)["digest"] == want[:8] + before
    finally:
        stage.close()


def test_a_killed_engines_mapping_is_closed(gpu_stage: Stage) -> None:
    watcher = gpu_stage.engine(register={"engine_id": "watcher"}, device="double")
    gpu_stage.wait_for_memory(watcher)
    before = gpu_stage.server.fds()
    for number in range(3):
        engine = gpu_stage.engine(register={"engine_id": "victim"}, device="double")
        assert gpu_stage.server.call("mappings")["mapped"] >= 2
        engine.call("store", seed=number, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
        engine.kill()
        eventually(lambda: watcher.call("stats")["stats"]["sessions"] == 1, 2)
        assert gpu_stage.server.fds() == before
    watcher.call("unregister")
    assert gpu_stage.server.call("mappings")["mapped"] == 0


def test_a_gpu_that_the_server_does_not_see_is_named(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path)
    try:
        engine = stage.engine(register={}, device="double")
        with pytest.raises(SideError, match=r"host memory only, not GPU-.*\[device\]"):
            engine.call("register")
    finally:
        stage.close()
