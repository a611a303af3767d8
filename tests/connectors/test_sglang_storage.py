"""The HiCache storage back end as SGLang calls it: what it answers when all is well, and when nothing is."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connectors.sglang_doubles import PoolName, PoolTransfer, hashes, host_pool, indices, install
from kvferry.errors import LayoutError
from serving.process import Stage, eventually

KEYS = hashes("x", 6)


def config(url: str, *, rank: int = 0, size: int = 1, mla: bool = False, **extra: Any) -> SimpleNamespace:
    settings = {"interface_v1": 1, "url": url, "model_id": "m@1", "staging_bytes": 1 << 20, "answer_timeout_s": 3.0}
    return SimpleNamespace(
        tp_rank=rank,
        tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        extra_config={**settings, **extra},
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a back end with a pool registered, which has its own bytes."""
    install(monkeypatch)
    made: list[Any] = []

    def begin(url: str, *, layout: str = "page_first", value: float | None = None, **options: Any) -> Any:
        storage = importlib.import_module("kvferry.connectors.sglang.storage")
        backend = storage.KVFerryStorage(config(url, **options), {})
        made.append(backend)
        pool = host_pool(layout, shared=options.get("mla", False))
        if value is not None:
            pool.kv_buffer.fill_(value)
        backend.register_mem_pool_host(pool)
        return backend

    yield begin
    for backend in made:
        backend.close()


@pytest.fixture
def ready(stage: Stage, make: Callable[..., Any]) -> Stage:
    probe = make(stage.url)
    eventually(lambda: probe._client.stats()["memory_bytes"] >= 16 << 20)
    return stage


def buffer(backend: Any) -> torch.Tensor:
    found = backend.mem_pool_host.kv_buffer
    assert isinstance(found, torch.Tensor)
    return found


def test_what_one_engine_sets_another_gets(ready: Stage, make: Callable[..., Any]) -> None:
    first, second = make(ready.url), make(ready.url, value=-1.0)
    assert first.batch_exists(KEYS) == 0
    assert first.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert first.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert second.batch_exists(KEYS) == 4
    assert second.exists(KEYS[0])
    assert second.batch_get_v1(KEYS, indices(5, 6, 7, 8, 9, 10)) == [True] * 4 + [False] * 2
    assert buffer(second)[:, 20:36].equal(buffer(first)[:, 0:16])
    assert bool((buffer(second)[:, 36:] == -1).all())


def test_the_hashes_before_count_and_no_more_than_was_asked_is_reported(ready: Stage, make: Callable[..., Any]) -> None:
    first = make(ready.url)
    first.batch_set_v1(KEYS, indices(*range(6)))
    before = SimpleNamespace(prefix_keys=KEYS[:2], extra_info=None)
    assert first.batch_exists(KEYS[2:4], before) == 2
    assert first.batch_exists(KEYS[2:4]) == 2
    assert first.batch_exists([]) == 0


def test_parts_set_after_their_beginning_are_one_chain(ready: Stage, make: Callable[..., Any]) -> None:
    first = make(ready.url)
    first.batch_set_v1(KEYS[:2], indices(0, 1), SimpleNamespace(prefix_keys=[]))
    first.batch_set_v1(KEYS[2:], indices(2, 3, 4, 5), SimpleNamespace(prefix_keys=KEYS[:2]))
    assert first._questions.runs(b"".join(map(bytes.fromhex, KEYS)))[0].num_pages == 6


def test_ranks_of_plain_models_are_apart_and_of_latent_ones_share(ready: Stage, make: Callable[..., Any]) -> None:
    plain = [make(ready.url, rank=rank, size=2) for rank in range(2)]
    plain[0].batch_set_v1(KEYS, indices(*range(6)))
    assert [one.batch_exists(KEYS) for one in plain] == [6, 0]
    latent = [make(ready.url, rank=rank, size=2, mla=True) for rank in range(2)]
    assert latent[1].batch_set_v1(KEYS, indices(*range(6))) == [True] * 6
    assert latent[1].batch_exists(KEYS) == 0  # not the rank that writes
    assert latent[0].batch_set_v1(KEYS, indices(*range(6))) == [True] * 6
    assert [one.batch_exists(KEYS) for one in latent] == [6, 6]


@pytest.mark.parametrize("other", [{"layout": "layer_first"}, {"model_id": "m@2"}, {"size": 4}])
def test_another_layout_model_or_size_is_a_miss(ready: Stage, make: Callable[..., Any], other: dict[str, Any]) -> None:
    make(ready.url).batch_set_v1(KEYS, indices(*range(6)))
    assert make(ready.url, **other).batch_exists(KEYS) == 0


def test_models_with_more_pools_get_nothing(ready: Stage, make: Callable[..., Any]) -> None:
    backend = make(ready.url)
    backend.batch_set_v1(KEYS, indices(*range(6)))
    states = [PoolTransfer(PoolName.MAMBA, keys=KEYS[:1])]
    assert backend.batch_exists_v2(KEYS, states).kv_hit_pages == 0
    assert backend.batch_exists_v2(KEYS).kv_hit_pages == 6
    assert backend.batch_get_v2(states) == {PoolName.MAMBA: [False]}
    assert backend.batch_set_v2(states) == {PoolName.MAMBA: [False]}


@pytest.mark.parametrize("keys", [["not hex"] * 6, ["00"] * 6, [None] * 6])
def test_nothing_that_sglang_gives_raises(ready: Stage, make: Callable[..., Any], keys: list[Any]) -> None:
    backend = make(ready.url)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(keys, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(KEYS, indices(0)) == [False] * 6
    assert backend.batch_get_v1(KEYS, torch.arange(23)) == [False] * 6
    assert backend.batch_exists(KEYS) == 0


def test_the_generic_calls_keep_and_find_nothing(ready: Stage, make: Callable[..., Any]) -> None:
    backend = make(ready.url)
    assert (backend.get("k"), backend.batch_get(KEYS), backend.set("k"), backend.batch_set(KEYS)) == (
        None,
        [None] * 6,
        False,
        False,
    )


def test_clear_forgets_and_close_hangs_up(ready: Stage, make: Callable[..., Any]) -> None:
    backend = make(ready.url)
    backend.batch_set_v1(KEYS, indices(*range(6)))
    assert backend.clear()
    assert backend.batch_exists(KEYS) == 0
    backend.close()
    backend.close()
    assert backend.batch_set_v1(KEYS, indices(*range(6))) == [False] * 6
    assert not backend.clear()


def test_an_engine_starts_and_goes_on_without_a_server(tmp_path: Path, make: Callable[..., Any]) -> None:
    backend = make(f"unix://{tmp_path / 'none.sock'}")
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(KEYS, indices(*range(6))) == [False] * 6


def test_hits_come_back_with_the_server(ready: Stage, make: Callable[..., Any]) -> None:
    backend = make(ready.url)
    os.kill(ready.server.pid, signal.SIGKILL)
    eventually(lambda: backend.batch_set_v1(KEYS, indices(*range(6))) == [False] * 6)
    ready.start_server()
    eventually(lambda: backend.batch_set_v1(KEYS, indices(*range(6))) == [True] * 6, 20)
    assert backend.batch_exists(KEYS) == 6


def test_a_thread_that_reads_and_one_that_writes(ready: Stage, make: Callable[..., Any]) -> None:
    """As SGLang has them, at the same time, on other pages."""
    first, second = make(ready.url), make(ready.url)
    prompts = [hashes(f"p{number}", 3) for number in range(12)]
    wanted = buffer(first)[:, :12].clone()
    for keys in prompts[:6]:
        assert all(first.batch_set_v1(keys, indices(0, 1, 2)))
    found: list[list[bool]] = []

    def read() -> None:
        found.extend(second.batch_get_v1(keys, indices(6, 7, 8)) for keys in prompts[:6])

    reader = threading.Thread(target=read)
    reader.start()
    kept = [second.batch_set_v1(keys, indices(9, 10, 11)) for keys in prompts[6:]]
    reader.join(30)
    assert found == [[True] * 3] * 6
    assert kept == [[True] * 3] * 6
    assert buffer(second)[:, 24:36].equal(wanted)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"interface_v1": 0}, "set interface_v1 to 1"),
        ({"modle_id": ""}, "did you mean 'model_id'"),
    ],
)
def test_mistakes_in_the_configuration_are_named(make: Callable[..., Any], extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make("unix:///none", **extra)


@pytest.mark.parametrize(("release", "refused"), [("0.5.9", True), ("0.5.19.post1", True), ("0.5.20", False)])
def test_releases_that_cannot_tell_adapters_apart_are_refused(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, release: str, refused: bool
) -> None:
    monkeypatch.setattr("kvferry.connectors.sglang.interface.version", lambda name: release)
    with pytest.raises(RuntimeError, match="keys pages by their tokens alone") if refused else nullcontext():
        make("unix:///none")


def test_an_unknown_pool_fails_the_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    storage = importlib.import_module("kvferry.connectors.sglang.storage")
    backend = storage.KVFerryStorage(config("unix:///none"), {})
    with pytest.raises(LayoutError, match="not only, one tensor"):
        backend.register_mem_pool_host(host_pool(kv_buffer=[]))
    with pytest.raises(LayoutError, match="decode context parallelism"):
        storage.KVFerryStorage(SimpleNamespace(**{**config("u").__dict__, "dcp_size": 2}), {})
