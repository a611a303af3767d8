"""Store, lookup, retrieve, between real engines and a real server: every byte right, or a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import SideError, Stage, Zygote, eventually

LATE = list(range(40, 64))
EARLY = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]  # three chunks, shuffled


def test_what_one_engine_stores_another_retrieves(stage: Stage) -> None:
    first = stage.engine(register={"engine_id": "a"})
    stage.wait_for_memory(first)
    want = first.call("fill", blocks=EARLY, seed=1)["digest"]
    tokens = 3 * CHUNK_TOKENS
    assert first.call("store", seed=1, num_tokens=tokens, blocks=EARLY) == {"stored": 3, "present": 0, "skipped": 0}
    second = stage.engine(register={"engine_id": "b"})
    assert second.call("lookup", seed=2, num_tokens=tokens)["tokens"] == 0
    found = second.call("lookup", seed=1, num_tokens=tokens + 5)
    assert found["tokens"] == tokens
    before = second.call("digest", blocks=LATE[12:])["digest"]
    assert second.call("retrieve", lease=found["lease"], blocks=LATE[:12])["failed"] == []
    assert second.call("digest", blocks=LATE[:12])["digest"] == want
    assert second.call("digest", blocks=LATE[12:])["digest"] == before
    assert first.call("store", seed=1, num_tokens=tokens, blocks=EARLY)["present"] == 3


@pytest.mark.parametrize("extra", [-1, 0, 1, CHUNK_TOKENS - 1])
def test_only_whole_chunks_count(stage: Stage, extra: int) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    num_tokens = CHUNK_TOKENS + extra
    whole = num_tokens // CHUNK_TOKENS
    assert engine.call("store", seed=1, num_tokens=num_tokens, blocks=EARLY[:8])["stored"] == whole
    assert engine.call("lookup", seed=1, num_tokens=num_tokens)["tokens"] == whole * CHUNK_TOKENS


def test_blocks_of_tokens_that_are_there_stay_as_they_are(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    want = engine.call("fill", blocks=EARLY, seed=1)["digest"]
    engine.call("store", seed=1, num_tokens=3 * CHUNK_TOKENS, blocks=EARLY)
    engine.call("wipe")
    blank = engine.call("digest", blocks=[0])["digest"] * 12
    found = engine.call("lookup", seed=1, num_tokens=3 * CHUNK_TOKENS)
    skip_blocks = CHUNK_BLOCKS + 1
    target = LATE[:12]
    assert engine.call("retrieve", lease=found["lease"], blocks=[*target, 1, 2], skip=skip_blocks * 16)["failed"] == []
    assert engine.call("digest", blocks=target)["digest"] == blank[:skip_blocks] + want[skip_blocks:]
    assert engine.call("digest", blocks=[1, 2])["digest"] == blank[:2]


def test_a_later_store_goes_on_where_an_earlier_one_ended(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    tokens = 3 * CHUNK_TOKENS
    late = engine.call("store", seed=1, num_tokens=tokens, blocks=EARLY, start=CHUNK_TOKENS)
    assert late == {"stored": 0, "present": 0, "skipped": 2}
    assert engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=EARLY[:4])["stored"] == 1
    assert engine.call("store", seed=1, num_tokens=tokens, blocks=EARLY, start=CHUNK_TOKENS)["stored"] == 2
    assert engine.call("lookup", seed=1, num_tokens=tokens)["tokens"] == tokens


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([0, 1, 2, 64], "block id 64 is outside"),
        ([0, 1, 2, -1], "start at 0"),
        ([0, 1, 2, 1 << 40], "fit into int32"),
        ([0, 1, 2, 2], "named twice"),
        ([0, 1, 2], "the whole chunks take 4"),
    ],
)
def test_bad_block_ids_are_refused_and_nothing_is_published(stage: Stage, blocks: list[int], words: str) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    with pytest.raises(SideError, match=words):
        engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=blocks)
    assert engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == 0
    assert engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])["stored"] == 1
    found = engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)
    outcome = engine.call("retrieve", lease=found["lease"], blocks=[5, 6, 7, 64])
    assert "64 is outside" in outcome["error"]
    assert outcome["failed"] == [5, 6, 7, 64]


def test_a_lease_is_taken_once_and_an_unknown_one_fails_all_blocks(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    lease = engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["lease"]
    assert engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["lease"] == lease
    assert engine.call("retrieve", lease=lease, blocks=[4, 5, 6, 7])["failed"] == []
    again = engine.call("retrieve", lease=lease, blocks=[4, 5, 6, 7])
    assert again["failed"] == [4, 5, 6, 7]
    assert "[lease]" in again["error"]
    engine.call("release", lease=lease)
    assert engine.call("stats")["stats"]["leases"] == 0


def test_promises_survive_other_requests_and_a_full_cache(zygote: Zygote, tmp_path: Path) -> None:
    """Two requests hold the same chunks; one gives them up, twice; the other still gets every byte."""
    stage = Stage(zygote, tmp_path, memory_bytes=4 << 16)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        want = engine.call("fill", blocks=EARLY, seed=1)["digest"]
        tokens = 3 * CHUNK_TOKENS
        engine.call("store", seed=1, num_tokens=tokens, blocks=EARLY)
        first = engine.call("lookup", seed=1, num_tokens=tokens, request="r1")["lease"]
        second = engine.call("lookup", seed=1, num_tokens=tokens, request="r2")["lease"]
        assert first != second
        for _ in range(2):
            engine.call("release", lease=first)
        pressed = engine.call("store", seed=9, num_tokens=4 * CHUNK_TOKENS, blocks=LATE[:16])
        assert pressed == {"stored": 1, "present": 0, "skipped": 3}
        assert engine.call("retrieve", lease=second, blocks=LATE[:12])["failed"] == []
        assert engine.call("digest", blocks=LATE[:12])["digest"] == want
        assert engine.call("store", seed=9, num_tokens=4 * CHUNK_TOKENS, blocks=LATE[:16])["stored"] == 3
        assert engine.call("lookup", seed=1, num_tokens=tokens, request="r3")["tokens"] == 0
        assert engine.call("stats")["stats"]["chunks_evicted"] == 3
    finally:
        stage.close()


def test_lookups_without_retrieve_do_not_lock_the_pool(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, memory_bytes=8 << 16)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        tokens = 6 * CHUNK_TOKENS  # all that one store may have
        engine.call("store", seed=1, num_tokens=tokens, blocks=list(range(24)))
        for number in range(100):
            found = engine.call("lookup", seed=1, num_tokens=tokens, request=f"r{number}")
            assert found["tokens"] == tokens
            engine.call("release", lease=found["lease"])
        assert engine.call("store", seed=2, num_tokens=tokens, blocks=list(range(24)))["stored"] == 6
    finally:
        stage.close()


def test_leases_end_by_time(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, lease_ttl_s=0.3)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
        engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)
        assert engine.call("stats")["stats"]["leases"] == 1
        eventually(lambda: engine.call("stats")["stats"]["leases"] == 0, 3)
    finally:
        stage.close()


def test_a_lookup_is_the_minimum_over_ranks_and_both_take_their_share(stage: Stage) -> None:
    ranks = [
        stage.engine(register={"engine_id": "tp", "rank": 0, "world_size": 2}),
        stage.engine(register={"engine_id": "tp", "rank": 1, "world_size": 2}),
    ]
    scheduler = stage.engine(register={})
    assert scheduler.call("attach", engine_id="tp") == {"ready": True}
    stage.wait_for_memory(scheduler)
    tokens = 3 * CHUNK_TOKENS
    wants = []
    for rank, side in enumerate(ranks):
        wants.append(side.call("fill", blocks=EARLY, seed=rank)["digest"])
        side.call("store", seed=1, num_tokens=tokens - rank * CHUNK_TOKENS, blocks=EARLY)
    found = scheduler.call("lookup", seed=1, num_tokens=tokens)
    assert found["tokens"] == 2 * CHUNK_TOKENS
    for rank, side in enumerate(ranks):
        assert scheduler.call("stats")["stats"]["leases"] == 1
        assert side.call("retrieve", lease=found["lease"], blocks=LATE[:8])["failed"] == []
        assert side.call("digest", blocks=LATE[:8])["digest"] == wants[rank][:8]
    assert scheduler.call("stats")["stats"]["leases"] == 0


def test_a_scheduler_gets_nothing_until_all_ranks_are_there(stage: Stage) -> None:
    scheduler = stage.engine(register={})
    assert scheduler.call("attach", engine_id="tp") == {"ready": False}
    rank = {"engine_id": "tp", "world_size": 2}
    first = stage.engine(register={**rank, "rank": 0})
    stage.wait_for_memory(first)
    first.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    assert scheduler.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == 0
    second = stage.engine(register={**rank, "rank": 1})
    second.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    assert scheduler.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == CHUNK_TOKENS
    second.call("unregister")
    assert scheduler.call("lookup", seed=1, num_tokens=CHUNK_TOKENS, request="later")["tokens"] == 0


def test_ranks_that_do_not_fit_are_refused(stage: Stage) -> None:
    stage.engine(register={"engine_id": "tp", "world_size": 2})
    other = stage.engine(register={}, heads=4)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"engine_id": "tp", "world_size": 2, "rank": 0}, r"alive.*\[rank_taken\]"),
        ({"engine_id": "tp", "world_size": 2, "rank": 1}, r"geometry.*\[geometry\]"),
        ({"engine_id": "tp", "world_size": 3, "rank": 1}, r"world size 3.*\[geometry\]"),
        ({"engine_id": "tp", "world_size": 2, "rank": 1, "model": "x"}, r"model x.*\[geometry\]"),
        ({"engine_id": "tp", "world_size": 2, "rank": 2}, "ranks start at 0"),
    )
    for register, words in cases:
        with pytest.raises(SideError, match=words):
            other.call("register", **register)
    other.call("register", engine_id="own")


def test_another_layout_is_a_miss(stage: Stage) -> None:
    first = stage.engine(register={"engine_id": "a"})
    stage.wait_for_memory(first)
    first.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    second = stage.engine(register={"engine_id": "b"}, heads=4)
    assert second.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == 0


def test_a_rank_registers_again_after_it_unregistered(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    for _ in range(3):
        engine.call("unregister")
        assert stage.server.call("mappings")["mapped"] == 0
        engine.call("register")
        assert engine.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == CHUNK_TOKENS
    mapped = stage.server.call("mappings")
    engine.call("register")
    assert stage.server.call("mappings") == mapped
    with pytest.raises(SideError, match="unregister"):
        engine.call("register", engine_id="another")


def test_a_hung_engine_holds_up_nobody_and_its_job_can_be_cancelled(stage: Stage) -> None:
    hung, well = stage.engine(register={"engine_id": "a"}), stage.engine(register={"engine_id": "b"})
    stage.wait_for_memory(well)
    hung.call("stick")
    hung.call("store", seed=1, num_tokens=2 * CHUNK_TOKENS, blocks=EARLY[:8], wait=False)
    assert well.call("store", seed=2, num_tokens=2 * CHUNK_TOKENS, blocks=EARLY[:8])["stored"] == 2
    assert well.call("lookup", seed=2, num_tokens=2 * CHUNK_TOKENS)["tokens"] == 2 * CHUNK_TOKENS
    assert hung.call("job", within_s=0.05)["done"] is False
    assert hung.call("cancel") == {"stopped": True}
    assert "[cancelled]" in hung.call("job")["error"]
    assert well.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == 0
    assert well.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=EARLY[:4])["stored"] == 1


def test_a_scheduler_follows_an_engine_that_comes_back_with_other_blocks(stage: Stage) -> None:
    scheduler = stage.engine(register={})
    first = stage.engine()
    stage.wait_for_memory(first)
    assert scheduler.call("attach") == {"ready": True}
    first.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    assert scheduler.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["tokens"] == CHUNK_TOKENS
    first.end()
    other = stage.engine(block_size=48)
    other.call("store", seed=1, num_tokens=200, blocks=[0, 1, 2, 3])
    assert scheduler.call("lookup", seed=1, num_tokens=200)["tokens"] == 192


def test_a_lease_from_before_another_layout_is_of_no_use(stage: Stage) -> None:
    """The scheduler's lease outlives the engine; one that comes back with other blocks must not be given the old KV."""
    scheduler = stage.engine(register={})
    first = stage.engine()
    stage.wait_for_memory(first)
    scheduler.call("attach")
    first.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    lease = scheduler.call("lookup", seed=1, num_tokens=CHUNK_TOKENS)["lease"]
    first.end()
    other = stage.engine(heads=4)
    before = other.call("digest", blocks=[0, 1, 2, 3])
    outcome = other.call("retrieve", lease=lease, blocks=[0, 1, 2, 3])
    assert "[lease]" in outcome["error"]
    assert outcome["failed"] == [0, 1, 2, 3]
    assert other.call("digest", blocks=[0, 1, 2, 3]) == before


def test_failed_blocks_are_those_of_the_promise_that_were_not_to_be_skipped(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    engine.call("store", seed=1, num_tokens=2 * CHUNK_TOKENS, blocks=list(range(8)))
    lease = engine.call("lookup", seed=1, num_tokens=2 * CHUNK_TOKENS)["lease"]
    blocks = [8, 9, 10, 11, 12, 13, 14, 99]
    outcome = engine.call("retrieve", lease=lease, blocks=[*blocks, 20, 21], skip=2 * 16)
    assert "99 is outside" in outcome["error"]
    assert outcome["failed"] == blocks[2:]
    assert engine.call("retrieve", lease=lease, blocks=list(range(8, 16)))["failed"] == []
