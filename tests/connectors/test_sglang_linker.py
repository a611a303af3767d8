"""The external linker as SGLang calls it, over token pools in host memory and a real server."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connectors.sglang_doubles import DIM, HEADS, LAYERS, PAGE, PoolName, PoolTransfer, hashes, indices, install
from kvferry.errors import LayoutError
from kvferry.ipc import allocate_shared
from serving.process import Stage, eventually, freeze

PAGES = 16
KEYS = hashes("x", 6)
FULL = SimpleNamespace(name="FULL")


def pool(value: float | None = None, kind: str = "MHATokenToKVPool", layers: int = LAYERS, **other: Any) -> Any:
    """A device pool: a tensor of tokens for each of K and V of each layer, each element another number."""
    shape = (PAGES * PAGE, HEADS, DIM)
    flat = allocate_shared((2 * layers, *shape), torch.float32)
    flat.copy_(torch.arange(flat.numel(), dtype=torch.float32).view(flat.shape))
    if value is not None:
        flat.fill_(value)
    found = SimpleNamespace(k_buffer=list(flat[::2]), v_buffer=list(flat[1::2]), start_layer=0, flat=flat, **other)
    found.kv_buffer = list(flat)
    return type(kind, (SimpleNamespace,), {})(**found.__dict__)


def params(device_pool: Any) -> SimpleNamespace:
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: device_pool),
        page_size=PAGE,
        attn_tp_cache_group=None,
        tp_cache_group=None,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
    )


@pytest.fixture
def make(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    install(monkeypatch)
    made: list[Any] = []

    def begin(value: float | None = None, *, kind: str = "MHATokenToKVPool", layers: int = LAYERS, **extra: Any) -> Any:
        linker = importlib.import_module("kvferry.connectors.sglang.linker")
        settings = {"url": stage.url, "model_id": "m@1", "answer_timeout_s": 3.0, "load_timeout_s": 3.0, **extra}
        found = linker.KVFerryLinker(
            SimpleNamespace(model_path="/models/tiny"),
            params(pool(value, kind, layers)),
            components=[FULL],
            extra_config=settings,
        )
        made.append(found)
        eventually(lambda: found._client.stats()["memory_bytes"] >= 16 << 20)
        return found

    yield begin
    for one in made:
        one.close()


def kv(keys: list[str], *pages: int) -> list[PoolTransfer]:
    return [PoolTransfer(PoolName.KV, keys=keys, device_indices=indices(*pages) if pages else None)]


def offload(linker: Any, keys: list[str], *pages: int) -> bool:
    assert linker.offload(kv(keys, *pages))
    eventually(lambda: linker.num_completed_offloads() == 1)
    return bool(linker.pop_completed_offload())


def load(linker: Any, rid: str, keys: list[str], *pages: int) -> bool:
    assert linker.load(rid, kv(keys, *pages))
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    linker.layer_done_counter.wait_until(0)
    return bool(linker.finish_layer_wise_loading(index))


def page(linker: Any, number: int) -> torch.Tensor:
    flat: torch.Tensor = linker.pools[PoolName.KV].flat
    return flat[:, number * PAGE : (number + 1) * PAGE].clone()


def num_leases(linker: Any) -> float:
    return float(linker._client.stats()["leases"])


def test_what_is_offloaded_is_loaded_elsewhere(make: Callable[..., Any]) -> None:
    first, second = make(), make(-1.0)
    assert first.lookup("r", kv(KEYS)) == []
    assert offload(first, KEYS[:4], 3, 9, 5, 6)
    assert second.lookup("r", kv(KEYS)) == [1, 2, 3, 4]
    assert load(second, "r", KEYS[:4], 10, 2, 4, 7)
    for source, target in zip((3, 9, 5, 6), (10, 2, 4, 7), strict=True):
        assert page(second, target).equal(page(first, source))
    assert bool((page(second, 11) == -1).all())
    assert second.start_layer_wise_loading() == -1
    assert num_leases(second) == 0


def test_other_weights_are_a_miss(make: Callable[..., Any]) -> None:
    offload(make(), KEYS, *range(6))
    assert make(-1.0, model_id="m@2").lookup("r", kv(KEYS)) == []
    assert make(-1.0).lookup("r", kv(KEYS)) == [1, 2, 3, 4, 5, 6]


def test_a_tail_is_found_though_its_beginning_is_on_the_device(make: Callable[..., Any]) -> None:
    first, second = make(), make(-1.0)
    offload(first, KEYS, *range(6))
    assert second.lookup("r", kv(KEYS[2:])) == [1, 2, 3, 4]
    assert load(second, "r", KEYS[2:], 8, 9, 10, 11)
    assert page(second, 11).equal(page(first, 5))


def test_nodes_that_came_one_by_one_are_found_together(make: Callable[..., Any]) -> None:
    first, second = make(), make(-1.0)
    offload(first, KEYS[:2], 0, 1)
    offload(first, KEYS[2:5], 2, 3, 4)
    assert second.lookup("r", kv(KEYS)) == [1, 2, 3, 4, 5]
    assert load(second, "r", KEYS[:5], 8, 9, 10, 11, 12)
    assert page(second, 12).equal(page(first, 4))
    assert page(second, 9).equal(page(first, 1))


def test_less_than_promised_can_be_loaded(make: Callable[..., Any]) -> None:
    """Another rank has less."""
    first, second = make(), make(-1.0)
    offload(first, KEYS, *range(6))
    second.lookup("r", kv(KEYS))
    assert load(second, "r", KEYS[:3], 8, 9, 10)
    assert page(second, 10).equal(page(first, 2))
    assert bool((page(second, 11) == -1).all())
    assert num_leases(second) == 0


def test_what_is_loaded_is_offered_again_and_not_stored_twice(make: Callable[..., Any]) -> None:
    first, second = make(), make(-1.0)
    offload(first, KEYS, *range(6))
    second.lookup("r", kv(KEYS))
    load(second, "r", KEYS, *range(6))
    stored = first._client.stats()["bytes_stored"]
    assert offload(second, KEYS, *range(6))
    assert first._client.stats()["bytes_stored"] == stored


def test_a_promise_holds_though_others_clear_what_it_is_of(make: Callable[..., Any]) -> None:
    first, second = make(), make(-1.0)
    offload(first, KEYS, *range(6))
    second.lookup("r", kv(KEYS))
    first._client.clear()
    assert load(second, "r", KEYS, *range(6))
    assert page(second, 5).equal(page(first, 5))


def test_a_request_that_asks_again_has_one_promise(make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    for _ in range(5):
        first.lookup("r", kv(KEYS))
    assert num_leases(first) == 1
    assert not first.cancel_queued_load("r")
    eventually(lambda: num_leases(first) == 0)


def test_a_queued_load_can_be_cancelled(make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    first.lookup("r", kv(KEYS))
    first.load("r", kv(KEYS, *range(8, 14)))
    with pytest.raises(RuntimeError, match="queued already"):
        first.layer_done_counter.queue("r", None)
    before = page(first, 8)
    assert first.cancel_queued_load("r")
    assert first.start_layer_wise_loading() == -1
    assert page(first, 8).equal(before)
    eventually(lambda: num_leases(first) == 0)


def test_offloads_are_told_in_order(make: Callable[..., Any]) -> None:
    first = make()
    for number in range(5):
        assert first.offload(kv(hashes(f"p{number}", 2), 2 * number, 2 * number + 1))
    eventually(lambda: first.num_completed_offloads() == 5)
    assert [first.pop_completed_offload() for _ in range(5)] == [True] * 5
    with pytest.raises(IndexError):
        first.pop_completed_offload()


def test_other_pools_are_neither_kept_nor_found(make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    both = [*kv(KEYS, *range(6)), PoolTransfer(PoolName.MAMBA, keys=KEYS[:1])]
    assert first.lookup("r", both) == []
    assert first.lookup("r", [*kv(KEYS[:2]), *kv(KEYS[2:])]) == []
    assert not first.load("r", both)
    assert not first.offload(both)


def test_latents_are_written_by_one_rank_for_all(make: Callable[..., Any]) -> None:
    first, second = make(kind="MLATokenToKVPool"), make(-1.0, kind="MLATokenToKVPool")
    assert first._rank.shared
    object.__setattr__(first._rank, "tp_rank", 1)
    assert offload(first, KEYS, *range(6))
    assert first.lookup("r", kv(KEYS)) == []  # another rank's turn
    object.__setattr__(first._rank, "tp_rank", 0)
    assert offload(first, KEYS, *range(6))
    assert second.lookup("r", kv(KEYS)) == [1, 2, 3, 4, 5, 6]
    assert load(second, "r", KEYS, *range(6))
    assert page(second, 5).equal(page(first, 5))
    assert make(-1.0).lookup("r", kv(KEYS)) == []  # plain keys and values are something else


def test_a_void_promise_is_refused_by_a_rank_alone(stage: Stage, make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    assert first.lookup("r", kv(KEYS)) == [1, 2, 3, 4, 5, 6]
    first._promises.clear()
    first._client.clear()
    assert not first.load("r", kv(KEYS, *range(6)))
    object.__setattr__(first._rank, "tp_size", 2)
    assert first.load("r", kv(KEYS, *range(6)))
    assert not first.finish_layer_wise_loading(first.start_layer_wise_loading())


def test_a_dead_server_fails_what_was_promised_and_is_a_miss_then(stage: Stage, make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    first.lookup("r", kv(KEYS))
    first.load("r", kv(KEYS, *range(8, 14)))
    os.kill(stage.server.pid, signal.SIGKILL)
    eventually(lambda: not first._client.connected, 30)
    assert not first.finish_layer_wise_loading(first.start_layer_wise_loading())
    assert first.lookup("s", kv(KEYS)) == []
    assert not offload(first, hashes("y", 1), 0)


def test_a_stopped_server_holds_a_load_until_it_goes_on(stage: Stage, make: Callable[..., Any]) -> None:
    """SGLang frees the slots of a failed load: until the server has stopped, the load has not ended."""
    first = make()
    offload(first, KEYS, *range(6))
    first.lookup("r", kv(KEYS))
    first.load("r", kv(KEYS, *range(8, 14)))
    freeze(stage.server.pid)
    ended: list[bool] = []
    index = first.start_layer_wise_loading()
    waiting = threading.Thread(target=lambda: ended.append(first.finish_layer_wise_loading(index)))
    waiting.start()
    try:
        waiting.join(4)
        assert not ended
    finally:
        os.kill(stage.server.pid, signal.SIGCONT)
    waiting.join(30)
    assert len(ended) == 1
    if ended[0]:
        assert page(first, 13).equal(page(first, 5))


def test_a_stopped_server_costs_lookups_a_moment_once(stage: Stage, make: Callable[..., Any]) -> None:
    first = make(pause_s=30.0)
    offload(first, KEYS, *range(6))
    freeze(stage.server.pid)
    try:
        assert first.lookup("r", kv(KEYS)) == []
        asked = time.monotonic()
        assert [first.lookup(f"r{number}", kv(KEYS)) for number in range(50)] == [[]] * 50
        assert time.monotonic() - asked < 5
    finally:
        os.kill(stage.server.pid, signal.SIGCONT)


def test_a_stopped_server_gets_a_part_of_the_device_at_most(stage: Stage, make: Callable[..., Any]) -> None:
    """What it was told of stays locked until it goes on; the rest is given back."""
    first = make(load_timeout_s=1.0)
    prompts = [hashes(f"p{number}", 1) for number in range(6)]
    freeze(stage.server.pid)
    try:
        for number, keys in enumerate(prompts):
            assert first.offload(kv(keys, number))

        def given_back() -> int:
            assert first.num_completed_offloads() == 0
            return sum(one.result is False for one in first._offloads._offloads)

        eventually(lambda: given_back() == 4, 20)
    finally:
        os.kill(stage.server.pid, signal.SIGCONT)
    eventually(lambda: first.num_completed_offloads() == 6, 20)
    assert [first.pop_completed_offload() for _ in range(6)][2:] == [False] * 4


def test_reset_sees_all_through(make: Callable[..., Any]) -> None:
    first = make()
    offload(first, KEYS, *range(6))
    first.lookup("r", kv(KEYS))
    first.load("r", kv(KEYS, *range(8, 14)))
    first.start_layer_wise_loading()
    first.lookup("s", kv(KEYS))
    first.offload(kv(hashes("y", 1), 7))
    first.reset()
    assert first.num_completed_offloads() == 0
    eventually(lambda: num_leases(first) == 0)


@pytest.mark.parametrize(
    ("change", "components", "words"),
    [
        ({"dcp_size": 2}, [FULL], "decode context parallelism is on"),
        ({"kind": "MHATokenToKVPoolFP4"}, [FULL], "MHATokenToKVPoolFP4: KVferry's linker serves"),
        ({}, [FULL, SimpleNamespace(name="MAMBA")], "the components FULL, MAMBA"),
        ({}, [SimpleNamespace(name="SWA")], "full attention only"),
    ],
)
def test_unknown_set_ups_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], components: list[Any], words: str
) -> None:
    install(monkeypatch)
    linker = importlib.import_module("kvferry.connectors.sglang.linker")
    args = SimpleNamespace(dcp_size=change.get("dcp_size", 1))
    with pytest.raises(LayoutError, match=words):
        linker.KVFerryLinker(args, params(pool(**change)), components=components, extra_config={"url": "unix:///none"})
