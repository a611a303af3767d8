"""Who sees what: all of the server's numbers for who runs it, for others what is their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.protocol.messages import Hello, Welcome
from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS
from serving.process import Zygote, eventually
from serving.raw import Raw
from serving.tcp import TcpStage, tcp_stage
from serving.tiers import CHUNK, settle, stats, store
from serving.tokens import TOKENS, text_of, token_server, welcomed

THEIRS = {"healthy", "memory_bytes", "chunks", "memory_used_bytes", "sessions", "engines"}
DISK = {"disk_chunks", "disk_used_bytes"}


@pytest.fixture
def served(zygote: Zygote, tmp_path: Path) -> Iterator[TcpStage]:
    with tcp_stage(zygote, tmp_path, disk_path=str(tmp_path / "disk"), disk_bytes=64 << 20) as made:
        yield made


def test_a_tenant_sees_its_own_and_the_operator_all(served: TcpStage) -> None:
    stage = served.stage
    operator = stage.engine(register={})
    stage.wait_for_memory(operator)
    eventually(lambda: not stats(operator)["disk_scanning"])
    remote = served.engine("operator", register={})
    mine = stage.engine(num_blocks=64)
    assert CHUNK_BLOCKS * CHUNK_TOKENS
    for seed, chunks in ((1, 4), (2, 3)):
        store(mine, seed, chunks)
    settle(operator)
    every = stats(operator)
    assert every["sessions"] == 3
    assert every["engines"] == 1
    assert (every["chunks"], every["memory_used_bytes"]) == (7, 7 * CHUNK)
    assert {name for name in every if name.startswith("misses_")}
    assert set(stats(remote)) == set(every)
    tenant = served.engine("a", register={})
    assert set(stats(tenant)) == THEIRS | DISK
    seen = stats(tenant)
    assert (seen["healthy"], seen["memory_bytes"], seen["sessions"]) == (1, every["memory_bytes"], 1)
    assert {seen[name] for name in THEIRS | DISK if name not in ("healthy", "memory_bytes", "sessions")} == {0}


def test_what_a_token_has_stored_is_what_it_sees(served: TcpStage) -> None:
    stage = served.stage
    operator = stage.engine(register={})
    stage.wait_for_memory(operator)
    eventually(lambda: not stats(operator)["disk_scanning"])
    for token, chunks in (("a", 2), ("operator", 5)):
        engine = stage.engine(token=text_of(TOKENS[token]), register={"engine_id": token})
        store(engine, 1, chunks)
    settle(operator)
    assert stats(operator)["disk_chunks"] == 7
    seen = stats(served.engine("a", register={}))
    assert {name: seen[name] for name in ("chunks", "memory_used_bytes", "disk_chunks", "engines", "sessions")} == {
        "chunks": 2,
        "memory_used_bytes": 2 * CHUNK,
        "disk_chunks": 2,
        "engines": 1,
        "sessions": 2,
    }


def test_a_token_on_the_unix_socket_does_not_hide_the_servers_own_user(tmp_path: Path) -> None:
    """The kernel says who it is, and it could read the server's memory anyway."""
    with token_server(tmp_path) as server, contextlib.ExitStack() as stack:
        by_path, by_tcp, operator = (
            stack.enter_context(contextlib.closing(welcomed(url, TOKENS[name])))
            for url, name in ((server.path, "a"), (server.tcp, "a"), (server.tcp, "operator"))
        )
        plain = stack.enter_context(contextlib.closing(Raw(server.path, Hello(1, 1))))
        assert isinstance(plain.reply(), Welcome)
        assert set(by_tcp.stats()) == THEIRS
        assert set(by_path.stats()) == set(operator.stats()) == set(plain.stats()) > THEIRS
