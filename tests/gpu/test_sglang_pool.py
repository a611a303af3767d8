"""SGLang's device pools on a GPU: per layer a K and a V tensor of slots, shared as they are; pages bit for bit."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connectors.sglang_doubles import PoolName, PoolTransfer, hashes, install
from kvferry.cli.children import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

LAYERS, HEADS, DIM, PAGE, PAGES = 4, 8, 128, 64, 33  # page 0 is SGLang's padding


def device_pool(kind: str, dtype: torch.dtype) -> Any:
    """A pool as SGLang allocates it: every layer's tensors by torch, one by one."""
    tokens = PAGES * PAGE
    found = type(kind, (SimpleNamespace,), {})(start_layer=0)
    if kind == "MLATokenToKVPool":
        found.kv_buffer = [zeros(tokens, 1, 576, dtype=dtype) for _ in range(LAYERS)]
        found.tensors = found.kv_buffer
    else:
        made = [zeros(tokens, HEADS, DIM, dtype=dtype) for _ in range(2 * LAYERS)]
        found.k_buffer, found.v_buffer, found.tensors = made[::2], made[1::2], made
    return found


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Of any data type, also of those for which torch has no arithmetic."""
    return torch.zeros(*shape[:-1], shape[-1] * dtype.itemsize, dtype=torch.uint8, device="cuda").view(dtype)


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for tensor in pool.tensors:
        tensor.view(torch.uint8).random_(generator=generator)


def indices(*pages: int) -> torch.Tensor:
    """As SGLang gives them: on the device."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE, device="cuda") for page in pages])


def kv(keys: list[str], *pages: int) -> list[PoolTransfer]:
    return [PoolTransfer(PoolName.KV, keys=keys, device_indices=indices(*pages) if pages else None)]


def pages_of(pool: Any, *pages: int) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8)[indices(*pages)].cpu() for tensor in pool.tensors]


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.005)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes linkers, as in engines of their own, on one server."""
    install(monkeypatch)
    # What SGLang's base class does; the events of a stream that nobody works on are done at once.
    linker = importlib.import_module("kvferry.connectors.sglang.linker")
    made: list[Any] = []

    def record(self: Any) -> list[torch.cuda.Event]:
        events = [torch.cuda.Event()]  # type: ignore[no-untyped-call]
        events[0].record()
        if self.forward_stream is not None:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            events[1].record(self.forward_stream)
        return events

    monkeypatch.setattr(linker.KVFerryLinker, "record_offload_ready", record, raising=False)
    with ServerProcess(tmp_path / "s", 256 << 20, "cuda") as server:

        def begin(pool: Any, forward_stream: Any = None) -> Any:
            params = SimpleNamespace(
                token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
                page_size=PAGE,
                attn_tp_cache_group=None,
                tp_cache_group=None,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
            )
            found = linker.KVFerryLinker(
                SimpleNamespace(model_path="/models/tiny"),
                params,
                components=[SimpleNamespace(name="FULL")],
                extra_config={"url": server.url, "model_id": "m@1", "answer_timeout_s": 10.0},
                forward_stream=forward_stream,
            )
            made.append(found)
            eventually(lambda: found._client.stats()["memory_bytes"] >= 256 << 20)
            return found

        yield begin
        for one in made:
            one.close()


def told(linker: Any) -> str:
    """All that helps to see from afar what went wrong."""
    stats = {name: value for name, value in sorted(linker._client.stats().items()) if value}
    return f"{linker._client!r}, offloads {list(linker._offloads._offloads)}, server: {stats}"


def offload(linker: Any, keys: list[str], *pages: int) -> None:
    assert linker.offload(kv(keys, *pages))
    eventually(lambda: linker.num_completed_offloads() == 1)
    (begun,) = linker._offloads._offloads
    assert linker.pop_completed_offload(), f"{begun.job and begun.job.error!r}; {told(linker)}"


def check_found(linker: Any, keys: list[str], count: int) -> None:
    assert linker.lookup("r", kv(keys)) == list(range(1, count + 1)), told(linker)


def load(linker: Any, keys: list[str], *pages: int) -> None:
    assert linker.load("r", kv(keys, *pages)), told(linker)
    index = linker.start_layer_wise_loading()
    jobs = linker.layer_done_counter._batches[index].jobs
    linker.layer_done_counter.set_consumer(index)
    linker.layer_done_counter.wait_until(0)
    assert linker.finish_layer_wise_loading(index), f"{jobs}; {told(linker)}"


def check_same(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        wrong = (one != other).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, (
            f"{what}: tensor {number}: tokens {wrong[:8]} of {len(wrong)} that are wrong, {len(one)} in all"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["MHATokenToKVPool", "MLATokenToKVPool"])
def test_pages_go_round_bit_for_bit(make: Callable[..., Any], kind: str, dtype: torch.dtype) -> None:
    source, target = device_pool(kind, dtype), device_pool(kind, dtype)
    fill(source, 1)
    fill(target, 2)
    first, second = make(source), make(target)
    keys = hashes("x", 6)
    wanted, others = pages_of(source, 3, 9, 5, 32, 1, 17), pages_of(target, 0, 1, 2, 3)
    offload(first, keys, 3, 9, 5, 32, 1, 17)
    check_found(second, keys, 6)
    load(second, keys, 30, 8, 4, 7, 31, 12)
    check_same(pages_of(target, 30, 8, 4, 7, 31, 12), wanted, "what was loaded")
    check_same(pages_of(target, 0, 1, 2, 3), others, "what nobody may write to")
    check_found(second, hashes("y", 2), 0)


@pytest.mark.parametrize("kind", ["MHATokenToKVPool", "MLATokenToKVPool"])
def test_each_layer_is_there_when_the_forward_comes_to_it(make: Callable[..., Any], kind: str) -> None:
    source, target = device_pool(kind, torch.bfloat16), device_pool(kind, torch.bfloat16)
    fill(source, 1)
    fill(target, 2)
    first, second = make(source), make(target)
    keys, pages = hashes("x", PAGES - 1), range(1, PAGES)
    wanted = pages_of(source, *pages)
    offload(first, keys, *pages)
    check_found(second, keys, len(keys))
    assert second.load("r", kv(keys, *reversed(pages))), told(second)
    counter, tensors_a_layer = second.layer_done_counter, len(wanted) // LAYERS
    index = second.start_layer_wise_loading()
    (job,) = counter._batches[index].jobs
    counter.set_consumer(index)
    for layer in range(LAYERS):
        counter.wait_until(layer)
        first_tensor = layer * tensors_a_layer
        layer_tensors = target.tensors[first_tensor : first_tensor + tensors_a_layer]
        found = [tensor.view(torch.uint8)[indices(*reversed(pages))].cpu() for tensor in layer_tensors]
        check_same(found, wanted[first_tensor : first_tensor + tensors_a_layer], f"layer {layer}")
    assert second.finish_layer_wise_loading(index), f"{job!r}; {told(second)}"
    assert (job.stages, job._stages_done) == (LAYERS, LAYERS - 1)  # each was told of, but for the last
    check_same(pages_of(target, *reversed(pages)), wanted, "what was loaded")


def test_an_offload_reads_what_the_forward_stream_is_still_writing(make: Callable[..., Any]) -> None:
    pool = device_pool("MHATokenToKVPool", torch.bfloat16)
    other = device_pool("MHATokenToKVPool", torch.bfloat16)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    first, second = make(pool, stream), make(other)
    keys = hashes("x", 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call] # some 0.2 s
        for tensor in pool.tensors:
            tensor[indices(1, 2)] = 5.0
    offload(first, keys, 1, 2)
    check_found(second, keys, 2)
    load(second, keys, 3, 4)
    written = [tensor[indices(3, 4)].cpu() for tensor in other.tensors]
    check_same(written, [torch.full_like(one, 5.0) for one in written], "written by the forward")


def test_another_data_type_is_a_miss(make: Callable[..., Any]) -> None:
    first = make(device_pool("MHATokenToKVPool", torch.bfloat16))
    second = make(device_pool("MHATokenToKVPool", torch.float16))
    keys = hashes("x", 2)
    offload(first, keys, 1, 2)
    check_found(second, keys, 0)
