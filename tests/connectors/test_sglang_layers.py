"""Layer-wise loads: the forward is at the first layers while the others are still coming."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from connectors.sglang_doubles import LAYERS, PAGE, PoolName
from connectors.test_sglang_linker import KEYS, kv, make, offload, page, pool
from kvferry.connectors.sglang.device_pool import device_caches, num_layers
from serving.process import Stage, eventually

__all__ = ["make"]

FROM, TO = range(6), range(8, 14)


def begin(stage: Stage, linker: Any, *, stages_done: int) -> int:
    """Load `KEYS` into `TO`, and have the server wait when that many stages are done; the batch's number."""
    offload(linker, KEYS, *FROM)
    linker.pools[PoolName.KV].flat[:, TO[0] * PAGE :] = -1.0
    stage.server.call("hold_copy", at=stages_done * len(KEYS) + 1, stoppable=True)
    assert len(linker.lookup("r", kv(KEYS))) == len(KEYS)
    assert linker.load("r", kv(KEYS, *TO))
    index = int(linker.start_layer_wise_loading())
    linker.layer_done_counter.set_consumer(index)
    return index


def check_tensors(linker: Any, num_loaded: int) -> None:
    """The first tensors of the pool have all pages; no other has any byte of them."""
    for source, target in zip(FROM, TO, strict=True):
        found, wanted = page(linker, target), page(linker, source)
        assert torch.equal(found[:num_loaded], wanted[:num_loaded])
        assert bool((found[num_loaded:] == -1).all())


def goes_on(linker: Any, layer: int, within_s: float) -> threading.Thread:
    """A forward that waits for a layer; whether it goes on is to be seen."""
    waiting = threading.Thread(target=linker.layer_done_counter.wait_until, args=(layer,))
    waiting.start()
    waiting.join(within_s)
    return waiting


def test_the_forward_goes_on_while_later_layers_are_coming(stage: Stage, make: Callable[..., Any]) -> None:
    linker = make()
    index = begin(stage, linker, stages_done=1)
    linker.layer_done_counter.wait_until(0)
    eventually(lambda: bool(stage.server.call("holds")["holds"]))
    check_tensors(linker, 2)
    waiting = goes_on(linker, 1, 0.2)
    assert waiting.is_alive()
    stage.server.call("let_go")
    waiting.join(10)
    linker.layer_done_counter.wait_until(linker.layer_done_counter.num_layers - 1)  # as for a graph of all layers
    check_tensors(linker, 2 * LAYERS)
    assert linker.finish_layer_wise_loading(index)


@pytest.mark.parametrize(("kind", "layers"), [("MHATokenToKVPool", 20), ("MLATokenToKVPool", 10)])
@pytest.mark.parametrize("stages_done", [1, 6, 7, 15])
def test_there_are_fewer_stages_than_layers(
    stage: Stage, make: Callable[..., Any], kind: str, layers: int, stages_done: int
) -> None:
    """20 layers of 2 tensors, or of 1, in 16 stages: a layer is there with the stage that has its last tensor."""
    tensors, a_layer = 2 * layers, 2 if kind == "MHATokenToKVPool" else 1
    linker = make(kind=kind, layers=layers)
    assert linker.layer_done_counter.num_layers == 20
    index = begin(stage, linker, stages_done=stages_done)
    assert linker.layer_done_counter._batches[index].jobs[0].stages == 16
    num_loaded = stages_done * tensors // 16
    layer = num_loaded // a_layer - 1
    if layer >= 0:
        linker.layer_done_counter.wait_until(layer)
    eventually(lambda: bool(stage.server.call("holds")["holds"]))
    check_tensors(linker, num_loaded)
    waiting = goes_on(linker, layer + 1, 0.1)
    assert waiting.is_alive()
    stage.server.call("let_go")
    waiting.join(10)
    assert linker.finish_layer_wise_loading(index)
    check_tensors(linker, tensors)


def test_a_load_that_fails_later_holds_up_no_layer_and_is_told_at_the_end(
    stage: Stage, make: Callable[..., Any]
) -> None:
    linker = make()
    index = begin(stage, linker, stages_done=1)
    linker.layer_done_counter.wait_until(0)
    eventually(lambda: bool(stage.server.call("holds")["holds"]))
    stage.server.kill()
    for layer in range(1, LAYERS):
        linker.layer_done_counter.wait_until(layer)
    assert all(job.done() for job in linker.layer_done_counter._batches[index].jobs)
    assert not linker.finish_layer_wise_loading(index)


def test_a_load_that_takes_too_long_is_stopped_before_the_forward_goes_on(
    stage: Stage, make: Callable[..., Any]
) -> None:
    linker = make(load_timeout_s=1.0)
    index = begin(stage, linker, stages_done=1)
    linker.layer_done_counter.wait_until(0)
    waiting = goes_on(linker, 1, 3.0)
    assert waiting.is_alive()  # the server has not stopped it
    stage.server.call("let_go")
    waiting.join(10)
    assert linker.layer_done_counter._batches[index].jobs[0].done()
    assert not linker.finish_layer_wise_loading(index)


def test_a_batch_has_several_loads(make: Callable[..., Any]) -> None:
    linker = make()
    offload(linker, KEYS, *FROM)
    for number, part in enumerate((slice(2), slice(2, 6))):
        assert len(linker.lookup(f"r{number}", kv(KEYS[part]))) == len(KEYS[part])
        assert linker.load(f"r{number}", kv(KEYS[part], *TO[part]))
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
        for source, target in zip(FROM, TO, strict=True):
            assert torch.equal(page(linker, target)[: 2 * layer + 2], page(linker, source)[: 2 * layer + 2])
    assert linker.finish_layer_wise_loading(index)


def test_layers_are_counted_where_all_are_alike() -> None:
    assert num_layers(device_caches(pool())) == LAYERS
    assert num_layers(device_caches(pool(kind="MLATokenToKVPool"))) == 2 * LAYERS
    other = pool()
    other.v_buffer = [tensor[..., : tensor.shape[-1] // 2] for tensor in other.v_buffer]
    assert num_layers(device_caches(other)) == LAYERS  # V is narrower than K, in all of them
    other.v_buffer[1] = pool().v_buffer[1]
    assert num_layers(device_caches(other)) == 1
    other = pool()
    other.k_buffer[2] = other.k_buffer[0]
    assert num_layers(device_caches(other)) == 1


def test_layers_that_differ_are_loaded_at_once(stage: Stage, make: Callable[..., Any]) -> None:
    linker = make()
    linker.layer_done_counter.num_layers = 1
    index = begin(stage, linker, stages_done=1)
    assert linker.layer_done_counter._batches[index].jobs[0].stages == 1
    stage.server.call("let_go")
    for layer in (0, LAYERS - 1):
        linker.layer_done_counter.wait_until(layer)
        check_tensors(linker, 2 * LAYERS)
    assert linker.finish_layer_wise_loading(index)
