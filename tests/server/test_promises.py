"""What a lookup promised is delivered, or every rank names the same failed blocks (C4, C5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Side, Stage, Zygote, eventually

CHUNK = 65_536
NUM_CHUNKS = 4
TOKENS = NUM_CHUNKS * CHUNK_TOKENS
EARLY = list(range(16))
LATE = list(range(40, 56))


@pytest.fixture
def pair(zygote: Zygote, tmp_path: Path) -> Iterator[tuple[Stage, list[Side], Side]]:
    """A server that checks its memory, the two ranks of an engine, and its scheduler."""
    stage = Stage(zygote, tmp_path, verify_memory=True)
    try:
        ranks = [
            stage.engine(register={"engine_id": "tp", "rank": rank, "world_size": 2}, num_blocks=64)
            for rank in range(2)
        ]
        scheduler = stage.engine(register={}, num_blocks=1)
        stage.wait_for_memory(scheduler)
        assert scheduler.call("attach", engine_id="tp")["ready"]
        yield stage, ranks, scheduler
    finally:
        stage.close()


def store(ranks: list[Side]) -> list[list[str]]:
    """Both ranks store the prompt; what their blocks held."""
    held = []
    for number, rank in enumerate(ranks):
        held.append(rank.call("fill", blocks=EARLY, seed=number)["digest"])
        rank.call("store", seed=1, num_tokens=TOKENS, blocks=EARLY)
    return held


def lookup(side: Side, request: str = "r") -> tuple[int, int]:
    """How many chunks are promised, and the lease."""
    found = side.call("lookup", seed=1, num_tokens=TOKENS, request=request)
    return found["tokens"] // CHUNK_TOKENS, found["lease"]


def test_a_chunk_that_one_rank_lacks_is_promised_to_none(pair: tuple[Stage, list[Side], Side]) -> None:
    stage, ranks, scheduler = pair
    held = store(ranks)
    stage.server.call("meddle", what="evict", rank=1, place=3)
    chunks, lease = lookup(scheduler)
    assert chunks == 2
    for rank, want in zip(ranks, held, strict=True):
        assert rank.call("retrieve", lease=lease, blocks=LATE)["failed"] == []
        assert rank.call("digest", blocks=LATE[:8])["digest"] == want[:8]
    values = scheduler.call("stats")["stats"]
    assert (values["misses_evicted"], values["leases"]) == (1, 0)


@pytest.mark.parametrize("how", ["lose", "spoil"])
def test_a_chunk_lost_after_the_lookup_fails_the_same_blocks_on_both_ranks(
    pair: tuple[Stage, list[Side], Side], how: str
) -> None:
    stage, ranks, scheduler = pair
    held = store(ranks)
    chunks, lease = lookup(scheduler)
    assert chunks == NUM_CHUNKS
    stage.server.call("meddle", what=how, rank=1, place=3)
    for number in (1, 0):
        rank, want = ranks[number], held[number]
        rank.call("wipe")
        blank = rank.call("digest", blocks=LATE[8:])["digest"]
        outcome = rank.call("retrieve", lease=lease, blocks=LATE)
        assert outcome["failed"] == LATE[2 * CHUNK_BLOCKS :]
        assert ("[integrity]" if how == "spoil" and number == 1 else "[cut]") in outcome["error"]
        assert rank.call("digest", blocks=LATE[:8])["digest"] == want[:8]
        assert rank.call("digest", blocks=LATE[8:])["digest"] == blank
    values = scheduler.call("stats")["stats"]
    assert values["retrieves_failed"] == 2
    assert values["chunks_damaged"] == (how == "spoil")
    chunks, lease = lookup(scheduler)  # the same request again gets what can be delivered
    assert chunks == 2
    for rank, want in zip(ranks, held, strict=True):
        assert rank.call("retrieve", lease=lease, blocks=LATE)["failed"] == []
        assert rank.call("digest", blocks=LATE[:8])["digest"] == want[:8]
    assert scheduler.call("stats")["stats"]["leases"] == 0
    store(ranks[1:])
    assert lookup(scheduler)[0] == NUM_CHUNKS


@pytest.mark.parametrize("how", ["lose", "spoil"])
def test_ranks_agree_too_where_they_retrieve_in_stages(pair: tuple[Stage, list[Side], Side], how: str) -> None:
    """One that finds a damaged chunk has no whole chunk yet, so that none counts for the others either."""
    stage, ranks, scheduler = pair
    held = store(ranks)
    _, lease = lookup(scheduler)
    stage.server.call("meddle", what=how, rank=1, place=3)
    num_good = 2 * CHUNK_BLOCKS if how == "lose" else 0
    for number in (1, 0):
        rank = ranks[number]
        outcome = rank.call("retrieve", lease=lease, blocks=LATE, stages=2)
        assert outcome["failed"] == LATE[num_good:]
        assert rank.call("digest", blocks=LATE[:num_good])["digest"] == held[number][:num_good]
    chunks, lease = lookup(scheduler, "again")
    assert chunks == 2
    for rank, want in zip(ranks, held, strict=True):
        assert rank.call("retrieve", lease=lease, blocks=LATE, stages=2)["failed"] == []
        assert rank.call("digest", blocks=LATE[:8])["digest"] == want[:8]


def test_a_chunk_lost_while_one_rank_copies_fails_there_too(pair: tuple[Stage, list[Side], Side]) -> None:
    stage, ranks, scheduler = pair
    held = store(ranks)
    _, lease = lookup(scheduler)
    stage.server.call("hold_copy", at=1, stoppable=False)
    ranks[0].ask("retrieve", lease=lease, blocks=LATE)
    eventually(lambda: stage.server.call("holds")["holds"])
    stage.server.call("meddle", what="lose", rank=1, place=3)
    stage.server.call("let_go")
    for rank, want, outcome in (
        (ranks[0], held[0], ranks[0].answer()),
        (ranks[1], held[1], ranks[1].call("retrieve", lease=lease, blocks=LATE)),
    ):
        assert outcome["failed"] == LATE[2 * CHUNK_BLOCKS :]
        assert rank.call("digest", blocks=LATE[:8])["digest"] == want[:8]


def test_nothing_can_be_delivered_of_a_first_chunk_that_is_lost(pair: tuple[Stage, list[Side], Side]) -> None:
    stage, ranks, scheduler = pair
    store(ranks)
    _, lease = lookup(scheduler)
    stage.server.call("meddle", what="spoil", rank=0, place=1)
    before = ranks[0].call("digest", blocks=LATE)
    assert ranks[0].call("retrieve", lease=lease, blocks=LATE)["failed"] == LATE
    assert ranks[0].call("digest", blocks=LATE) == before
    outcome = ranks[1].call("retrieve", lease=lease, blocks=LATE, skip=CHUNK_TOKENS)
    assert outcome["failed"] == LATE[CHUNK_BLOCKS:]
    scheduler.call("release", lease=lease)
    assert scheduler.call("stats")["stats"]["leases"] == 0
    assert lookup(scheduler) == (0, 0)


def test_a_damaged_chunk_that_nobody_wants_harms_nobody(pair: tuple[Stage, list[Side], Side]) -> None:
    """The engine has the first chunks itself; only what is written has to be right."""
    stage, ranks, scheduler = pair
    held = store(ranks)
    _, lease = lookup(scheduler)
    stage.server.call("meddle", what="spoil", rank=0, place=2)
    skip = 2 * CHUNK_TOKENS
    assert ranks[0].call("retrieve", lease=lease, blocks=LATE, skip=skip)["failed"] == []
    assert ranks[0].call("digest", blocks=LATE[8:])["digest"] == held[0][8:]
    assert ranks[1].call("retrieve", lease=lease, blocks=LATE)["failed"] == []


def test_pins_are_owned_and_a_clear_waits_for_them(zygote: Zygote, tmp_path: Path) -> None:
    """C4, to the letter."""
    stage = Stage(zygote, tmp_path, memory_bytes=8 * CHUNK)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        want = store([engine])[0]
        _, first = lookup(engine, "r1")
        _, second = lookup(engine, "r2")
        assert lookup(engine, "r1") == (NUM_CHUNKS, first)
        assert engine.call("retrieve", lease=first, blocks=LATE)["failed"] == []
        for _ in range(2):
            engine.call("release", lease=first)
        for seed in (7, 8, 9):
            engine.call("store", seed=seed, num_tokens=TOKENS, blocks=EARLY)
        assert engine.call("stats")["stats"]["chunks_evicted"] == 2 * NUM_CHUNKS
        assert engine.call("clear", seed=1, num_tokens=TOKENS) == {"cleared": NUM_CHUNKS}
        assert lookup(engine, "r3") == (0, 0)
        pressed = engine.call("store", seed=10, num_tokens=2 * TOKENS, blocks=[*EARLY, *LATE])
        assert pressed["stored"] == NUM_CHUNKS  # the others are promised still
        engine.call("wipe")
        assert engine.call("retrieve", lease=second, blocks=LATE)["failed"] == []
        assert engine.call("digest", blocks=LATE)["digest"] == want
        values = engine.call("stats")["stats"]
        assert (values["leases"], values["memory_used_bytes"]) == (0, NUM_CHUNKS * CHUNK)
        assert values["misses_not_stored"] == 1
    finally:
        stage.close()


def test_what_is_cleared_while_it_is_stored_is_not_there_afterwards(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    engine.call("stick")
    engine.call("store", seed=1, num_tokens=TOKENS, blocks=EARLY, wait=False)
    scheduler = stage.engine(register={}, num_blocks=1)
    scheduler.call("attach")
    assert scheduler.call("clear") == {"cleared": 0}
    assert engine.call("cancel") == {"stopped": True}
    assert scheduler.call("stats")["stats"]["memory_used_bytes"] == 0


def test_only_a_whole_engine_is_cleared(stage: Stage) -> None:
    rank = stage.engine(register={"engine_id": "tp", "world_size": 2})
    with pytest.raises(Exception, match="not_ready"):
        rank.call("clear")
