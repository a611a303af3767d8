"""The server is killed and comes back, or hangs up: engines go on, register again by themselves, and hits come back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_TOKENS
from serving.process import Side, Stage, Zygote, eventually, freeze

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
OTHERS = list(range(40, 52))
TOKENS = 3 * CHUNK_TOKENS
BACK_S = 10.0


def store_and_hit(engine: Side, seed: int) -> None:
    """Store a prompt, and get it back, byte by byte, into other blocks."""
    want = engine.call("fill", blocks=BLOCKS, seed=seed)["digest"]
    assert engine.call("store", seed=seed, num_tokens=TOKENS, blocks=BLOCKS)["stored"] == 3
    hit(engine, seed, want)


def hit(engine: Side, seed: int, want: list[str]) -> None:
    found = engine.call("lookup", seed=seed, num_tokens=TOKENS, request=f"seed {seed}")
    assert found["tokens"] == TOKENS
    assert engine.call("retrieve", lease=found["lease"], blocks=OTHERS) == {"failed": [], "error": None}
    assert engine.call("digest", blocks=OTHERS)["digest"] == want


def is_back(engine: Side) -> bool:
    return bool(engine.call("connected")["connected"])


def kill(server: Side) -> None:
    server.kill()
    eventually(lambda: not server.alive)  # until then it answers at its socket


def test_killed_between_a_store_and_its_reply(stage: Stage) -> None:
    """S4."""
    engine = stage.engine()
    stage.wait_for_memory(engine)
    store_and_hit(engine, 1)
    lease = engine.call("lookup", seed=1, num_tokens=TOKENS)["lease"]
    before = engine.call("connected")["incarnation"]
    freeze(stage.server.pid)
    engine.call("store", seed=2, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
    kill(stage.server)
    assert "no connection" in engine.call("job")["error"]
    assert engine.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == 0
    refused = engine.call("retrieve", lease=lease, blocks=OTHERS)
    assert (refused["failed"], refused["error"][:15]) == (OTHERS, "ServerGoneError")

    stage.start_server()
    started = time.monotonic()
    eventually(lambda: is_back(engine))
    assert engine.call("connected")["incarnation"] != before
    assert engine.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == 0  # its memory went with the old server
    void = engine.call("retrieve", lease=lease, blocks=OTHERS)
    assert (void["failed"], void["error"][-7:]) == (OTHERS, "[lease]")
    stage.wait_for_memory(engine)
    store_and_hit(engine, 3)
    assert time.monotonic() - started < BACK_S


@pytest.mark.parametrize("back", ["killed", "hung up"])
def test_registering_twice_gives_one_mapping(stage: Stage, back: str) -> None:
    engine = stage.engine()
    for _ in range(2):
        inode = engine.call("register")["inode"]
        assert stage.server.memfd_inodes().count(inode) == 1
        if back == "killed":
            kill(stage.server)
            stage.start_server()
        else:
            engine.call("hang_up")
        eventually(lambda: is_back(engine))
    stats = engine.call("stats")["stats"]
    assert (stats["engines"], stats["sessions"]) == (1, 1)
    assert stage.server.memfd_inodes().count(inode) == 1
    engine.call("unregister")
    assert inode not in stage.server.memfd_inodes()


@pytest.mark.timeout(120)  # it takes ten seconds where nothing else runs
@pytest.mark.parametrize("device", ["cpu", "double"])
def test_fifty_kills(zygote: Zygote, tmp_path: Path, device: str) -> None:
    """The engine asks all the time, stores, and gets its bytes back; 10 kills are enough over the driver's double."""
    double = device == "double"
    stage = Stage(zygote, tmp_path, device="cuda" if double else "cpu", double=double)
    try:
        engine = stage.engine(device=device)
        stage.wait_for_memory(engine)
        engine.call("impatient")
        engine.call("keep_asking", seed=1, num_tokens=TOKENS)
        dice = random.Random(1)
        fds: list[str] = []
        for number in range(10 if double else 50):
            store_and_hit(engine, number)
            if number == 2:
                fds = engine.fds()
            engine.call("store", seed=1000 + number, num_tokens=TOKENS, blocks=BLOCKS, wait=False)
            time.sleep(dice.random() * 0.002)
            kill(stage.server)
            assert engine.call("job")["done"]
            stage.start_server()
            eventually(lambda: is_back(engine))
            stage.wait_for_memory(engine)
        asked = engine.call("stop_asking")
        assert asked["errors"] == []
        assert asked["hits"] > 0
        assert asked["misses"] > 0
        assert asked["longest_s"] < 5
        assert engine.fds() == fds
    finally:
        stage.close()


def test_a_scheduler_and_all_ranks_come_back(stage: Stage) -> None:
    ranks = [stage.engine(register={"engine_id": "tp", "rank": rank, "world_size": 2}) for rank in range(2)]
    scheduler = stage.engine(register={})
    assert scheduler.call("attach", engine_id="tp")["ready"]
    for _ in range(2):
        kill(stage.server)
        assert scheduler.call("lookup", seed=1, num_tokens=TOKENS)["tokens"] == 0
        stage.start_server()
        eventually(lambda: all(is_back(side) for side in (*ranks, scheduler)))
        stage.wait_for_memory(ranks[0])
        for rank in ranks:
            rank.call("fill", blocks=BLOCKS, seed=1)
            rank.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
        found = scheduler.call("lookup", seed=1, num_tokens=TOKENS)
        assert found["tokens"] == TOKENS
        for rank in ranks:
            assert rank.call("retrieve", lease=found["lease"], blocks=OTHERS)["error"] is None


def test_hits_come_back_from_disk(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, disk_path=str(tmp_path / "disk"), disk_bytes=64 << 20)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        want = engine.call("fill", blocks=BLOCKS, seed=1)["digest"]
        engine.call("store", seed=1, num_tokens=TOKENS, blocks=BLOCKS)
        eventually(lambda: engine.call("stats")["stats"]["disk_chunks_written"] == 3)
        kill(stage.server)
        stage.start_server()
        eventually(lambda: is_back(engine))
        stage.wait_for_memory(engine)
        eventually(lambda: engine.call("lookup", seed=1, num_tokens=TOKENS, wait_s=5.0)["tokens"] == TOKENS)
        hit(engine, 1, want)
    finally:
        stage.close()
