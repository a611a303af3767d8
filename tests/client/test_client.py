"""CacheClient: addresses, what it refuses, forks, servers that are not there or go away."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.client import CacheClient
from kvferry.client.jobs import Job, RetrieveResult, StoreResult
from kvferry.client.keys import RequestKeys
from kvferry.client.transfers import int32_ids
from kvferry.client.url import UnixAddress, parse_url
from kvferry.client.waiting import Waiting
from kvferry.errors import (
    BlockIdError,
    DeadlineError,
    LayoutError,
    ProtocolError,
    RequestError,
    ServerGoneError,
)
from kvferry.layout import KeyContext, chain_hashes
from kvferry.protocol.messages import Error, Pong, Progress, Proof, Register, Reply, Retrieved, Stored
from serving.engine_side import CHUNK_TOKENS, link_of, prompt
from serving.process import Stage, eventually
from serving.storages import storages_of

FORMAT = "vllm_flash_attention"


@pytest.mark.parametrize("url", ["unix:///tmp/s", "unix:/tmp/s", "/tmp/s"])
def test_addresses(url: str) -> None:
    assert parse_url(url) == UnixAddress("/tmp/s")


@pytest.mark.parametrize("url", ["", "unix:", "unix://", "http://host:1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="unix:///path"):
        parse_url(url)


@pytest.mark.parametrize("url", ["127.0.0.1:7777", "localhost:1", "[::1]:7777"])
def test_a_host_and_port_are_no_path(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"use tcp://{url}, or")):
        parse_url(url)


def test_no_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerGoneError, match=r"no server answers at .*/none"):
        CacheClient(str(tmp_path / "none"))


def test_a_client_leaves_nothing(stage: Stage) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with CacheClient(stage.url) as client:
            client.ping()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    with pytest.raises(ServerGoneError, match="closed"):
        client.ping()
    client.close()


def test_an_unclosed_client_warns(stage: Stage) -> None:
    clients = [CacheClient(stage.url)]
    link = link_of(clients[0])
    with pytest.warns(ResourceWarning, match="not closed"):
        clients.clear()
    eventually(lambda: link.ended)


def test_calls_in_the_wrong_order_say_what_is_missing(stage: Stage) -> None:
    with CacheClient(stage.url) as client:
        with pytest.raises(ValueError, match="attach"):
            client.lookup("r", [1, 2])
        with pytest.raises(ValueError, match="register_kv_caches"):
            client.store([1], [0])
        with pytest.raises(ValueError, match="register_kv_caches"):
            client.retrieve(1, [0])
        client.release(12345)
        client.unregister()


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(stage: Stage) -> None:
    good = torch.zeros(2, 4, 16, 2, 8)
    with CacheClient(stage.url) as client:
        for caches, hints, words in (
            ({}, None, "empty"),
            ({"a": torch.zeros(3, 4, 16, 2, 8)}, None, "must be 2"),
            ({"a": good}, {"tokens_per_block": 32}, "tokens_per_block = 32"),
            ({"a": good}, {"tokens_a_block": 16}, "tokens_a_block"),
        ):
            with pytest.raises(LayoutError, match=words):
                client.register_kv_caches(caches, engine_id="e", model="m", format=FORMAT, hints=hints)
        with pytest.raises(LayoutError, match="known formats"):
            client.register_kv_caches({"a": good}, engine_id="e", model="m", format="none")
        client.register_kv_caches({"a": good}, engine_id="e", model="m", format=FORMAT)
        assert client.chunk_tokens == 64


def test_a_server_for_host_memory_refuses_gpus_by_name(stage: Stage) -> None:
    """The refusal of a device, without having one: the registration names another."""
    with CacheClient(stage.url) as client:
        storages = storages_of({"a": torch.zeros(2, 4, 16, 2, 8)})
        layout = storages.layout
        storages.close()
        with pytest.raises(RequestError, match=r"host memory only, not GPU-1; .*\[device\]"):
            link_of(client).call(lambda seq: Register(seq, "e", "m", 0, 1, 64, "GPU-1", layout, b""), Proof, 5)


def test_a_forked_child_is_refused_and_its_parent_goes_on(stage: Stage) -> None:
    engine = stage.engine()
    text = engine.call("use_in_fork")["text"]
    assert text.startswith("ServerGoneError: this client belongs to the parent process")
    assert text.endswith("fileno=-1")
    engine.call("ping")


def test_keys_are_remembered_and_made_anew_when_tokens_change() -> None:
    keys = RequestKeys(max_requests=2)
    tokens = prompt(1, 200)
    none, lora = KeyContext(), KeyContext(lora="a")
    assert keys.keys("r", tokens[:130], 64, none) == chain_hashes(tokens[:130], 64)
    assert keys.keys("r", tokens.tolist(), 64, none) == chain_hashes(tokens, 64)
    assert keys.keys("r", tokens[:100], 64, none) == chain_hashes(tokens[:100], 64)
    changed = tokens.copy()
    changed[3] += 1
    assert keys.keys("r", changed, 64, none) == chain_hashes(changed, 64)
    assert keys.keys("r", changed, 64, lora) == chain_hashes(changed, 64, lora)
    assert keys.keys("r", changed, 32, lora) == chain_hashes(changed, 32, lora)
    for name in "abc":
        keys.keys(name, tokens, 64, none)
    assert len(keys._chains) == 2
    keys.forget("c")
    keys.forget("c")


def test_remembered_keys_are_bounded_in_bytes_too() -> None:
    keys = RequestKeys(max_bytes=3 * (4 * 640 + 10 * 32))
    for name in "abcd":
        keys.keys(name, prompt(1, 640), 64, KeyContext())
        keys.keys(name, prompt(1, 640), 64, KeyContext())
    assert list(keys._chains) == ["b", "c", "d"]
    keys.forget("c")
    keys.keys("e", prompt(1, 640), 64, KeyContext())
    assert list(keys._chains) == ["b", "d", "e"]
    keys.keys("large", prompt(1, 64_000), 64, KeyContext())
    assert list(keys._chains) == ["large"]
    keys.keys("small", prompt(1, 64), 64, KeyContext())
    assert list(keys._chains) == ["small"]


def test_a_job_ends_once_and_tells_how() -> None:
    good = Job[StoreResult]([1, 2], Stored)
    with pytest.raises(DeadlineError, match="still going on"):
        good.wait(0.01)
    good.end(Stored(1, 1, 2, 3))
    assert (good.wait(), good.error, good.failed_block_ids) == (StoreResult(1, 2, 3), None, ())
    assert good.cancel() is False
    bad = Job[RetrieveResult]([4, 5], Retrieved)
    bad.end(Error(1, "lease", "gone", np.array([5], dtype="<i4").tobytes()))
    assert bad.failed_block_ids == (5,)
    with pytest.raises(RequestError, match=r"gone \[lease\]"):
        bad.wait()
    assert bad.cancel() is True
    lost = Job[RetrieveResult]([4, 5], Retrieved)
    lost.end(ServerGoneError("gone"))
    assert lost.failed_block_ids == (4, 5)
    with pytest.raises(ServerGoneError):
        lost.wait()
    whole = Job[RetrieveResult]([4], Retrieved)
    whole.end(Retrieved(1, 1))
    assert whole.wait() == RetrieveResult(1)


@pytest.mark.parametrize(
    "answer",
    [
        Error(1, "lease", "gone", b"abc"),
        Error(1, "lease", "gone", np.array([6], dtype="<i4").tobytes()),
        Stored(1, 1, 0, 0),
        Retrieved(1, -1),
        Pong(1),
    ],
)
def test_a_job_ends_also_by_an_answer_that_makes_no_sense(answer: Reply) -> None:
    job = Job[RetrieveResult]([4, 5], Retrieved)
    job.end(answer)
    with pytest.raises(ProtocolError):
        job.wait(0)
    assert job.failed_block_ids == (4, 5)


def test_a_cancel_that_is_not_confirmed_says_so() -> None:
    job = Job[StoreResult]([1], Stored)
    asked: list[bool] = []
    job.bind(lambda: asked.append(True))
    with pytest.raises(DeadlineError, match="has not confirmed"):
        job.cancel(0.01)
    assert asked == [True]


def test_stages_are_waited_for_and_news_that_make_no_sense_are_none() -> None:
    job = Job[RetrieveResult]([1, 2], Retrieved, stages=4)
    job.wait_stages(0, 0)
    for told, done in ((0, 0), (2, 2), (1, 2), (-1, 2), (4, 2), (1 << 40, 2), (3, 3), (2, 3)):
        job.advance(told)
        job.wait_stages(done, 0)
        with pytest.raises(DeadlineError, match=f"stage {done + 1} of 4"):
            job.wait_stages(done + 1, 0)
    waiting = threading.Thread(target=job.wait_stages, args=(4, 20))
    waiting.start()
    job.end(Retrieved(1, 1))
    waiting.join(20)
    assert not waiting.is_alive()
    job.wait_stages(4, 0)
    failed = Job[RetrieveResult]([1, 2], Retrieved, stages=4)
    failed.advance(2)
    failed.end(ServerGoneError("gone"))
    with pytest.raises(ServerGoneError):
        failed.wait_stages(1, 0)


def test_progress_ends_nothing_and_is_for_jobs_alone() -> None:
    waiting, told = Waiting(), list[object]()
    waiting.add_job(1, told.append, lambda: None, lambda stages: told.append(stages))
    waiting.add_talk(2, told.append)
    for seq in (1, 2, 3):
        waiting.deliver(Progress(seq, 5))
    waiting.deliver(Retrieved(1, 1))
    waiting.deliver(Progress(1, 6))
    assert told == [5, Progress(2, 5), Retrieved(1, 1)]


@pytest.mark.parametrize("ids", [[[1]], [1.5], ["a"], [-1], [1 << 31]])
def test_what_is_no_block_id(ids: list[object]) -> None:
    with pytest.raises(BlockIdError):
        int32_ids(ids)  # type: ignore[arg-type]


def test_block_ids_of_any_kind() -> None:
    for ids in ([1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), range(1, 3)):
        assert int32_ids(ids).tolist() == [1, 2]  # type: ignore[arg-type]
    assert int32_ids([]).tolist() == []


def test_threads_share_a_client(stage: Stage) -> None:
    engine = stage.engine()
    stage.wait_for_memory(engine)
    engine.call("store", seed=1, num_tokens=CHUNK_TOKENS, blocks=[0, 1, 2, 3])
    failures: list[str] = []

    def ask(number: int, client: CacheClient) -> None:
        for turn in range(20):
            found = client.lookup(f"{number} {turn}", prompt(1 + number % 2, CHUNK_TOKENS))
            if found.tokens != CHUNK_TOKENS * (number % 2 == 0):
                failures.append(f"{number} got {found}")
            client.release(found.lease_id)

    with CacheClient(stage.url) as client:
        assert client.attach("e")
        threads = [threading.Thread(target=ask, args=(number, client)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert failures == []
        assert client.stats()["leases"] == 0
