"""Lookups that wait, prefetch, clear: what is sent, what comes back, and what older servers do not know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.scripted_server import ScriptedServer
from kvferry.client import CacheClient, Lookup, Prefetch
from kvferry.client.link import Link
from kvferry.errors import DeadlineError, RequestError
from kvferry.ipc import allocate_shared
from kvferry.layout import KeyChain, KeyContext, chain_hashes
from kvferry.protocol import messages
from kvferry.protocol.messages import Attach, Attached, Clear, Cleared, Found, Message, Prefetched, Request
from serving.engine_side import CHUNK_TOKENS, FORMAT, prompt
from serving.process import Stage, eventually

TOKENS = prompt(1, 3 * CHUNK_TOKENS + 5)
KEYS = chain_hashes(TOKENS, CHUNK_TOKENS)


def answer(request: Request) -> Sequence[Message]:
    """All chunks but one are there; a lookup that may wait gets its answer after half a second."""
    if isinstance(request, Attach):
        return [Attached(request.seq, True, CHUNK_TOKENS, 16)]
    if isinstance(request, messages.Lookup):
        time.sleep(0.5 if request.wait_s else 0.0)
        return [Found(request.seq, 2 * CHUNK_TOKENS, 7, CHUNK_TOKENS, CHUNK_TOKENS)]
    if isinstance(request, messages.Prefetch):
        return [Prefetched(request.seq, CHUNK_TOKENS, 2 * CHUNK_TOKENS)]
    return [Cleared(request.seq, 6)] if isinstance(request, Clear) else []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    made = ScriptedServer(tmp_path / "s", answer)
    yield made
    made.close()


@pytest.fixture
def client(server: ScriptedServer, tmp_path: Path) -> Iterator[CacheClient]:
    with CacheClient(str(tmp_path / "s"), timeout_s=0.3) as made:
        made.attach("e")
        yield made


def test_a_lookup_may_wait_longer_than_other_calls(client: CacheClient, server: ScriptedServer) -> None:
    assert client.lookup("r", TOKENS) == Lookup(2 * CHUNK_TOKENS, 7, CHUNK_TOKENS)
    assert client.lookup("r", TOKENS, wait_s=5.0).coming == CHUNK_TOKENS
    sent = [request for request in server.requests if isinstance(request, messages.Lookup)]
    assert [(request.keys, request.wait_s) for request in sent] == [(KEYS, 0.0), (KEYS, 5.0)]
    with pytest.raises(DeadlineError, match=r"within 0\.31 s"):
        client.lookup("r", TOKENS, wait_s=0.01)
    assert "open, 1 lookups not answered in time" in repr(client)
    for wait_s in (-1.0, float("nan"), 61.0):
        with pytest.raises(ValueError, match=r"Lookup: .*wait_s"):
            client.lookup("r", TOKENS, wait_s=wait_s)


def test_prefetch(client: CacheClient, server: ScriptedServer) -> None:
    assert client.prefetch(TOKENS) == Prefetch(CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    assert client.prefetch(TOKENS[:63]) == Prefetch(0, 0)
    salted = KeyContext(salt="s")
    client.prefetch(TOKENS, context=salted)
    sent = [request.keys for request in server.requests if isinstance(request, messages.Prefetch)]
    assert sent == [KEYS, chain_hashes(TOKENS, CHUNK_TOKENS, salted)]


def test_clear_forgets_a_prompt_or_all_and_never_all_by_mistake(client: CacheClient, server: ScriptedServer) -> None:
    assert client.clear(TOKENS) == 6
    assert client.clear() == 6
    assert client.clear(TOKENS[:63]) == 0
    assert client.clear([]) == 0
    sent = [(request.keys, request.start_chunk) for request in server.requests if isinstance(request, Clear)]
    assert sent == [(KEYS, 0), (b"", 0)]


def test_a_server_of_protocol_1_knows_neither_prefetch_nor_clear(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "old", answer, version=1)
    with CacheClient(str(tmp_path / "old")) as client:
        client.attach("e")
        for name, call in (("prefetch", lambda: client.prefetch(TOKENS)), ("clear", client.clear)):
            with pytest.raises(RequestError, match=rf"protocol 1, which has no {name}.*\[version\]"):
                call()
        assert client.lookup("r", TOKENS, wait_s=1.0).tokens == 2 * CHUNK_TOKENS
    server.close()


def test_calls_before_there_is_an_engine(tmp_path: Path, server: ScriptedServer) -> None:
    with CacheClient(str(tmp_path / "s")) as client:
        for call in (lambda: client.prefetch(TOKENS), client.clear):
            with pytest.raises(ValueError, match=r"register_kv_caches\(\) or attach\(\)"):
                call()


def test_a_store_with_the_request_of_a_lookup_is_not_hashed_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    extend = KeyChain.extend

    def count(self: KeyChain, tokens: Any) -> bytes:
        hashed.append(len(tokens))
        return extend(self, tokens)

    monkeypatch.setattr(KeyChain, "extend", count)
    cache = allocate_shared((2, 16, 16, 2, 8), torch.float32)
    with CacheClient(stage.url) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format=FORMAT)
        eventually(lambda: client.stats()["memory_bytes"] > 0)
        client.lookup("r", TOKENS[:130])
        assert client.store(TOKENS, range(12), request_id="r").wait().num_stored == 3
        assert hashed == [130, len(TOKENS) - 130]
        assert client.store(TOKENS, range(12)).wait().num_present == 3
        assert hashed[2:] == [len(TOKENS)]
        assert client.lookup("other", TOKENS).tokens == 3 * CHUNK_TOKENS


class Sizes:
    """A server whose engine has other chunks whenever it is asked; `ready_tokens` is what Attached says."""

    def __init__(self, sizes: Sequence[int], ready_tokens: int = CHUNK_TOKENS) -> None:
        self.ready_tokens = ready_tokens
        self._sizes = itertools.cycle(sizes)

    def __call__(self, request: Request) -> Sequence[Message]:
        if isinstance(request, Attach):
            return [Attached(request.seq, True, self.ready_tokens, 16)]
        if isinstance(request, messages.Lookup):
            return [Found(request.seq, 16, 7, next(self._sizes))]
        return []


def test_an_engine_that_came_back_with_other_chunks_is_found(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "s", Sizes([16]))
    with CacheClient(str(tmp_path / "s")) as client:
        client.attach("e")
        assert client.lookup("r", TOKENS) == Lookup(16, 7)
        assert client.chunk_tokens == 16
    server.close()


def test_a_server_that_changes_its_mind_is_asked_twice(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "s", Sizes([16, 32]))
    with CacheClient(str(tmp_path / "s")) as client:
        client.attach("e")
        assert client.lookup("r", TOKENS) == Lookup(0, 0)
        assert sum(isinstance(request, messages.Lookup) for request in server.requests) == 2
    server.close()


@pytest.mark.parametrize("call", ["lookup", "prefetch", "clear"])
def test_a_size_that_is_forgotten_in_the_middle_of_a_call_is_no_matter(
    client: CacheClient, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence = client._presence
    known = presence.known_chunk_tokens

    def then_connect_again(link: Link) -> int:
        chunk_tokens = known(link)
        presence.attach_later("e")  # what a reconnect does to it where the engine's ranks are not there
        return chunk_tokens

    monkeypatch.setattr(presence, "known_chunk_tokens", then_connect_again)
    if call == "lookup":
        assert client.lookup("r", TOKENS).tokens == 2 * CHUNK_TOKENS
    elif call == "prefetch":
        assert client.prefetch(TOKENS).tokens == CHUNK_TOKENS
    else:
        assert client.clear(TOKENS) == 6


def test_a_size_that_comes_late_is_not_taken_for_another_engines(client: CacheClient) -> None:
    presence = client._presence
    presence.learn("another", 16)
    assert presence.chunk_tokens == CHUNK_TOKENS
    presence.forget()
    presence.learn("e", 16)
    assert (presence.engine_id, presence.chunk_tokens) == (None, 0)


def test_a_server_that_hangs_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hangs = True
    server = ScriptedServer(
        tmp_path / "h", lambda request: [] if hangs and isinstance(request, messages.Lookup) else answer(request)
    )
    with CacheClient(str(tmp_path / "h"), timeout_s=0.2) as client:
        client.attach("e")
        for _ in range(3):
            with pytest.raises(DeadlineError):
                client.lookup("r", TOKENS)
        assert len(caplog.records) == 1
        hangs = False
        client.lookup("r", TOKENS)
        hangs = True
        with pytest.raises(DeadlineError):
            client.lookup("r", TOKENS)
        assert len(caplog.records) == 2
        assert "4 lookups" in repr(client)
    server.close()
