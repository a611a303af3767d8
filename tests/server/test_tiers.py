"""A real server over a real disk: what was stored outlives the server, and what goes wrong below it is a miss."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cache.tiers.format import HEADER_BYTES
from serving.engine_side import CHUNK_TOKENS
from serving.process import eventually
from serving.tiers import (
    CHUNK,
    MakeStage,
    file_of,
    files,
    key_of,
    load,
    restart,
    settle,
    started,
    stats,
    store,
    wait_until_ready,
)


def test_what_was_stored_outlives_the_server(make_stage: MakeStage) -> None:
    stage = make_stage()
    engine = started(stage)
    held = store(engine, 1, 8)
    assert settle(engine)["disk_bytes_written"] == 8 * CHUNK
    restart(stage)
    assert load(started(stage, register={"engine_id": "new"}), 1, 8, held) == 8
    wait_until_ready(stage, engine)
    assert load(engine, 1, 8, held) == 8  # and for the engine that was there all the time
    assert stats(engine)["disk_chunks_read"] == 8


def test_ranks_get_the_same_length_from_disk(make_stage: MakeStage) -> None:
    stage = make_stage()
    ranks = [stage.engine(num_blocks=192, register={"rank": rank, "world_size": 2}) for rank in (0, 1)]
    wait_until_ready(stage, ranks[0])
    held = [store(engine, 1, 4) for engine in ranks]
    settle(ranks[0])
    restart(stage)
    for engine in ranks:
        wait_until_ready(stage, engine)
    one_of_two = next(Path(stage._config["disk_path"]).glob(f"kvferry-1/*/{key_of(1, 3)}"))
    one_of_two.write_bytes(one_of_two.read_bytes()[:-1] + b"?")
    found = ranks[0].call("lookup", seed=1, num_tokens=4 * CHUNK_TOKENS, wait_s=20)
    assert found["tokens"] == 2 * CHUNK_TOKENS
    blocks = list(range(100, 108))
    for engine, want in zip(ranks, held, strict=True):
        assert engine.call("retrieve", lease=found["lease"], blocks=blocks) == {"failed": [], "error": None}
        assert engine.call("digest", blocks=blocks)["digest"] == want[:8]


@pytest.mark.parametrize("when", ["running", "down"])
def test_exactly_what_is_damaged_misses_and_is_counted(make_stage: MakeStage, when: str) -> None:
    """C8."""
    stage = make_stage()
    engine = started(stage)
    held = {seed: store(engine, seed, 8) for seed in (1, 2, 3)}
    settle(engine)
    if when == "running":
        restart(stage)
        wait_until_ready(stage, engine)
    else:
        stage.server.kill()
    one, other = file_of(stage, 1, 8), file_of(stage, 2, 8)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    flipped = file_of(stage, 3, 7)
    data = bytearray(flipped.read_bytes())
    data[-100] ^= 1
    flipped.write_bytes(data)
    cut = file_of(stage, 3, 8)
    os.truncate(cut, cut.stat().st_size - 1)
    if when == "down":
        restart(stage)
        wait_until_ready(stage, engine)
    assert [load(engine, seed, 8, held[seed]) for seed in (1, 2, 3)] == [7, 7, 6]
    values = settle(engine)
    assert values["disk_corrupt"] + values["disk_torn"] == 4
    assert values["disk_chunks"] == len(files(stage)) == 20
    if when == "running":
        assert values["misses_integrity"] == 3  # one a lookup
    for seed in (1, 2, 3):  # and all can be stored again
        assert store(engine, seed, 8) == held[seed]
        settle(engine)
    restart(stage)
    wait_until_ready(stage, engine)
    assert [load(engine, seed, 8, held[seed]) for seed in (1, 2, 3)] == [8, 8, 8]


def test_killed_while_it_writes_it_leaves_no_part_of_a_file(make_stage: MakeStage) -> None:
    """C7, C8: what is half on disk is not there, before the kill and after it."""
    stage = make_stage()
    engine = started(stage)
    held = store(engine, 1, 2)
    settle(engine)
    stage.server.call("hold_files")
    store(engine, 2, 3)
    eventually(lambda: stage.server.call("files_held")["held"] == 3)
    writing = Path(stage._config["disk_path"]) / "kvferry-1/writing"
    assert len(list(writing.iterdir())) == 3
    assert stats(engine)["disk_chunks_written"] == 2
    restart(stage)
    wait_until_ready(stage, engine)
    assert list(writing.iterdir()) == []
    assert (load(engine, 1, 2, held), load(engine, 2, 3, [])) == (2, 0)
    assert stats(engine)["disk_corrupt"] == 0


def test_killed_again_and_again_it_has_what_had_a_file(make_stage: MakeStage) -> None:
    stage = make_stage(disk_bytes=20 * CHUNK)
    engine = started(stage)
    held: dict[int, list[str]] = {}
    choose = random.Random(5)
    for number in range(3):
        for seed in range(3 * number, 3 * number + 3):
            held[seed] = store(engine, seed, 4)
        enough = choose.randint(1, 12)
        eventually(lambda enough=enough: stats(engine)["disk_chunks_written"] >= enough)  # type: ignore[misc]
        stage.server.kill()
        eventually(lambda: not stage.server.alive)
        kept = files(stage)
        lengths = {seed: next((n for n in range(4) if key_of(seed, n + 1) not in kept), 4) for seed in held}
        assert sum(lengths.values()) > 0
        stage.start_server()
        wait_until_ready(stage, engine)
        found = {seed: load(engine, seed, 4, held[seed]) for seed in held}
        # Files that had to make room may not have been deleted yet: there can be more than fit.
        too_many = max(0, len(kept) - 20 * CHUNK // (CHUNK + HEADER_BYTES))
        assert all(found[seed] <= lengths[seed] for seed in held)
        assert sum(lengths.values()) - sum(found.values()) <= too_many, (found, lengths, len(kept), stats(engine))
    assert stats(engine)["disk_corrupt"] == stats(engine)["disk_torn"] == 0


def test_as_much_is_loaded_as_there_is_memory_for(make_stage: MakeStage) -> None:
    """C7: room for 3 chunks, 5 are asked for."""
    stage = make_stage()
    engine = started(stage)
    held = store(engine, 1, 5)
    settle(engine)
    restart(stage, memory_bytes=3 * CHUNK)
    wait_until_ready(stage, engine)
    assert load(engine, 1, 5, held) == 3
    begun = time.monotonic()
    assert load(engine, 1, 5, held, wait_s=0) == 3
    assert time.monotonic() - begun < 1
    other = store(engine, 2, 2)
    settle(engine)
    assert load(engine, 1, 5, held) == 3
    assert load(engine, 2, 2, other) == 2


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 8 MiB, or with the limits given as the parameter."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", getattr(request, "param", "size=8m"), "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_up(make_stage: MakeStage, small_disk: Path) -> None:
    """C7: 20 MiB into 8, then files are deleted by hand."""
    stage = make_stage(disk_path=str(small_disk), memory_bytes=64 << 20)
    engine = started(stage, heads=128)  # chunks of 1 MiB
    held = {seed: store(engine, seed, 1) for seed in range(20)}
    values = settle(engine)
    assert values["chunks"] == 20
    assert 4 <= len(files(stage)) <= 7
    assert values["disk_chunks"] == len(files(stage))
    eventually(lambda: stats(engine)["disk_capacity_bytes"] <= 8 << 20)
    for path in files(stage).values():
        path.unlink()
    eventually(lambda: stats(engine)["disk_capacity_bytes"] > 8 << 20)
    written = values["disk_chunks_written"]
    held[30] = store(engine, 30, 4)
    assert settle(engine)["disk_chunks_written"] == written + 4
    restart(stage)
    wait_until_ready(stage, engine)
    assert load(engine, 30, 4, held[30]) == 4
    assert load(engine, 19, 1, held[19]) == 0


@pytest.mark.parametrize("small_disk", ["size=64m,nr_inodes=16"], indirect=True)
def test_a_disk_without_inodes_is_a_full_one(make_stage: MakeStage, small_disk: Path) -> None:
    stage = make_stage(disk_path=str(small_disk))
    engine = started(stage)
    for seed in range(20):
        store(engine, seed, 1)
        settle(engine)
    assert 8 <= len(files(stage)) <= 12
    assert stats(engine)["disk_chunks"] == len(files(stage))
    assert file_of(stage, 19, 1).exists()


def test_a_disk_that_vanishes(make_stage: MakeStage) -> None:
    stage = make_stage(memory_bytes=8 * CHUNK)
    engine = started(stage)
    held = store(engine, 1, 4)
    settle(engine)
    for seed in (2, 3):
        store(engine, seed, 6)
        settle(engine)
    shutil.rmtree(stage._config["disk_path"])
    assert load(engine, 1, 4, held) == 0
    values = settle(engine)
    assert values["disk_missing"] + values["disk_reads_failed"] > 0
    assert engine.call("ping")["ms"] < 1000
    other = store(engine, 4, 4)
    settle(engine)
    assert load(engine, 4, 4, other) == 4


def test_a_slow_disk_costs_stores_and_nothing_else(make_stage: MakeStage) -> None:
    stage = make_stage(memory_bytes=16 * CHUNK, stall_s=2.0)
    engine = started(stage)
    other = stage.engine(register={"engine_id": "other"}, num_blocks=192)
    held = store(engine, 1, 8)
    settle(engine)
    stage.server.call("hold_files", whole=True)
    for seed in (2, 3, 4):
        store(engine, seed, 8)
    values = stats(engine)
    assert values["chunks_skipped_behind"] > 0
    assert values["stores_failed"] == 0
    assert other.call("ping")["ms"] < 1000
    second = store(other, 2, 8)
    assert load(other, 2, 8, second, wait_s=0) == 8
    assert load(engine, 1, 8, held, wait_s=0) < 8
    eventually(lambda: not stats(engine)["healthy"])  # U6: a thread hangs
    stage.server.call("let_files_go")
    eventually(lambda: bool(stats(engine)["healthy"]))
    settle(engine)
    third = store(engine, 3, 8)
    settle(engine)
    assert load(engine, 3, 8, third) == 8
    assert load(engine, 1, 8, held) == 8


def test_write_back_keeps_what_memory_had_no_room_for(make_stage: MakeStage) -> None:
    stage = make_stage(memory_bytes=16 * CHUNK, write_policy="write-back")
    engine = started(stage)
    held = {1: store(engine, 1, 4)}
    assert stats(engine)["disk_chunks_written"] == 0
    for seed in range(2, 11):
        held[seed] = store(engine, seed, 4)
        eventually(lambda: stats(engine)["disk_queue"] == 0)
    assert stats(engine)["chunks_skipped_behind"] == 0
    assert [load(engine, seed, 4, held[seed]) for seed in held] == [4] * 10
    stage.server.end()  # in good order, so that it writes the rest
    stage.start_server()
    wait_until_ready(stage, engine)
    assert [load(engine, seed, 4, held[seed]) for seed in held] == [4] * 10


def test_what_was_cleared_does_not_come_back(make_stage: MakeStage) -> None:
    stage = make_stage()
    engine = started(stage)
    held = {seed: store(engine, seed, 4) for seed in (1, 2)}
    settle(engine)
    assert engine.call("clear", seed=1, num_tokens=4 * CHUNK_TOKENS)["cleared"] == 4
    assert len(files(stage)) == 4
    assert load(engine, 1, 4, held[1]) == 0
    assert load(engine, 2, 4, held[2]) == 4
    engine.call("clear")
    assert len(files(stage)) == 0
    restart(stage)
    wait_until_ready(stage, engine)
    assert load(engine, 2, 4, held[2]) == 0


def test_a_server_that_takes_its_folder_back_finds_what_another_one_has_left(make_stage: MakeStage) -> None:
    stage = make_stage("a")
    engine = started(stage)
    store(engine, 1, 4)
    settle(engine)
    shutil.rmtree(Path(stage._config["disk_path"]) / "kvferry-1")
    other = make_stage("b")
    held = store(started(other), 2, 6)
    eventually(lambda: len(files(other)) == 6)
    eventually(lambda: bool(stats(engine)["disk_paused"]))
    other.server.kill()
    eventually(lambda: stats(engine)["disk_chunks"] >= 6 and not stats(engine)["disk_scanning"], 30)
    assert load(engine, 2, 6, held) == 6
