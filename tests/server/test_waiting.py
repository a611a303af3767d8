"""Lookups that wait for a lower tier, and prefetches, from a real disk that is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.layout import chain_hashes
from kvferry.protocol.messages import Attach, Attached, Found, Hello, Lookup, Ping, Pong, Welcome
from kvferry.server.pending import MAX_PENDING
from serving.engine_side import CHUNK_TOKENS, prompt
from serving.process import Side, Stage, Zygote, eventually
from serving.raw import Raw

CHUNK = 65_536
TOKENS = 3 * CHUNK_TOKENS
Start = Callable[[], tuple[Stage, Side]]


@pytest.fixture
def below(zygote: Zygote, tmp_path: Path) -> Iterator[tuple[Stage, Side, list[str]]]:
    """Memory for 4 chunks over a disk that does not move: prompt 1 has one chunk in memory, and two only there."""
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 16 << 20}
    stage = Stage(zygote, tmp_path, memory_bytes=4 * CHUNK, **disk)
    try:
        engine = stage.engine()
        stage.wait_for_memory(engine)
        eventually(lambda: not stats(engine)["disk_scanning"])
        held = engine.call("fill", blocks=list(range(12)), seed=1)["digest"]
        for seed, written in ((1, 3), (2, 6)):
            engine.call("store", seed=seed, num_tokens=TOKENS, blocks=list(range(12)))
            eventually(lambda written=written: stats(engine)["disk_chunks_written"] == written)  # type: ignore[misc]
        stage.server.call("hold_files", whole=True)
        yield stage, engine, held
    finally:
        stage.close()


def stats(side: Side) -> dict[str, float]:
    values: dict[str, float] = side.call("stats")["stats"]
    return values


def test_a_prefetch_says_what_is_there_and_what_may_come(below: tuple[Stage, Side, list[str]]) -> None:
    stage, engine, held = below
    assert engine.call("prefetch", seed=1, num_tokens=TOKENS) == {"tokens": CHUNK_TOKENS, "coming": 2 * CHUNK_TOKENS}
    assert engine.call("prefetch", seed=9, num_tokens=TOKENS) == {"tokens": 0, "coming": 0}
    found = engine.call("lookup", seed=1, num_tokens=TOKENS)
    assert (found["tokens"], found["coming"]) == (CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    stage.server.call("let_files_go")
    found = engine.call("lookup", seed=1, num_tokens=TOKENS, wait_s=20)
    assert (found["tokens"], found["coming"]) == (TOKENS, 0)
    assert engine.call("retrieve", lease=found["lease"], blocks=list(range(40, 52)))["failed"] == []
    assert engine.call("digest", blocks=list(range(40, 52)))["digest"] == held
    assert stats(engine)["disk_chunks_read"] == 2


def test_what_memory_has_stays_while_the_lookup_waits(below: tuple[Stage, Side, list[str]]) -> None:
    stage, engine, _ = below
    other = stage.engine(register={"engine_id": "other"})
    engine.ask("lookup", seed=1, num_tokens=TOKENS, wait_s=20)
    eventually(lambda: stats(other)["lookups_waiting"] == 1)
    assert stats(other)["leases"] == 1
    other.call("store", seed=3, num_tokens=4 * CHUNK_TOKENS, blocks=list(range(16)))
    stage.server.call("let_files_go")
    assert engine.answer()["tokens"] == TOKENS
    assert stats(other)["leases"] == 1


def test_a_session_that_waits_is_served_meanwhile_and_leaves_nothing(below: tuple[Stage, Side, list[str]]) -> None:
    stage, engine, _ = below
    keys = chain_hashes(prompt(1, TOKENS), CHUNK_TOKENS)
    client = Raw(stage.path, Hello(2, 1), Attach(1, "e"))
    replies = [client.reply() for _ in range(2)]
    assert [type(reply) for reply in replies] == [Welcome, Attached]
    for seq in range(MAX_PENDING + 1):
        client.send(Lookup(seq, "r", keys, wait_s=30.0))
    late = client.reply()
    assert isinstance(late, Found)
    assert (late.seq, late.tokens, late.coming) == (MAX_PENDING, CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    client.send(Ping(5))
    assert isinstance(client.reply(), Pong)
    values = stats(engine)
    assert (values["lookups_waiting"], values["leases"]) == (MAX_PENDING, 1)
    client.close()
    eventually(lambda: stats(engine)["lookups_waiting"] == stats(engine)["leases"] == 0)
    stage.server.call("let_files_go")
    assert engine.call("lookup", seed=1, num_tokens=TOKENS, wait_s=20)["tokens"] == TOKENS


def test_an_engine_that_goes_while_a_lookup_waits(below: tuple[Stage, Side, list[str]]) -> None:
    stage, engine, _ = below
    scheduler = stage.engine(register={}, num_blocks=1)
    scheduler.call("attach")
    scheduler.ask("lookup", seed=1, num_tokens=TOKENS, wait_s=20)
    eventually(lambda: stats(engine)["lookups_waiting"] == 1)
    engine.call("unregister")
    stage.server.call("let_files_go")
    assert scheduler.answer() == {"tokens": 0, "lease": 0, "coming": 0}
    assert stats(engine)["misses_not_ready"] == 1
