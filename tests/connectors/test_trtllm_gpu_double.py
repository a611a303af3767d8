"""TensorRT-LLM's pool in memory of cudaMalloc, over the driver's double: handles, mappings; no GPU needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles import fake_cuda
from doubles.trt_blocks import PoolShape
from doubles.trt_fixtures import Start, starting, wait_for_memory
from doubles.trt_interface import Stub
from doubles.trt_memory import cuda_pool, host_memory
from doubles.trt_requests import Setup
from doubles.vmm_pool import VmmPool
from kvferry.connectors import trtllm
from kvferry.cuda.memory import HandleType
from kvferry.errors import UnsupportedMemoryError
from kvferry.ipc import RawCudaIPCWrapper
from serving.process import Stage, Zygote

PROMPT = list(range(1000, 1200))
SETUP = Setup(keeps=False, shape=PoolShape(blocks=14))


@pytest.fixture
def gpu_stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, device="cuda", double=True)
    yield made
    made.close()


@pytest.fixture
def start_on_gpu(stub: Stub, gpu_stage: Stage, model: str) -> Iterator[Start]:
    wait_for_memory(gpu_stage.url)
    with fake_cuda.installed(), starting(stub, model, gpu_stage.url) as make:
        yield make


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_an_engine_computed_its_successor_loads(start_on_gpu: Start, gpu_stage: Stage, num_ranks: int) -> None:
    setup = dataclasses.replace(SETUP, num_ranks=num_ranks, shape=PoolShape(blocks=14, heads=2 // num_ranks))
    first = start_on_gpu(setup, make_pool=cuda_pool)
    for worker in first.workers:
        registration = worker._client._presence.registration
        assert [type(wrapper) for wrapper in registration.storages.wrappers] == [RawCudaIPCWrapper]
        assert registration.storages.layout.format == "trtllm_pool"
    (request,) = first.run(PROMPT)
    assert gpu_stage.server.call("mappings")["mapped"] == num_ranks
    first.close()
    assert gpu_stage.server.call("mappings")["mapped"] == 0
    (again,) = start_on_gpu(setup, make_pool=cuda_pool).run(PROMPT)
    assert (request.matched, again.matched) == (0, 192)
    assert again.tokens == request.tokens


@pytest.mark.parametrize("setup", [SETUP, dataclasses.replace(SETUP, v2=True, shape=PoolShape(blocks=14, tokens=64))])
def test_virtual_memory_without_handles_ends_the_start(start_on_gpu: Start, setup: Setup) -> None:
    """As V2's where the driver permits no fabric handles, or V1's of an engine that can sleep."""
    pools: list[VmmPool] = []

    def make(setup: Setup) -> torch.Tensor:
        shape = setup.shape
        pools.append(VmmPool(shape.blocks * shape.layers * shape.factor * shape.width * 2, types=HandleType(0)))
        pool = pools[-1].tensor().view(torch.bfloat16)[: shape.blocks * shape.layers * shape.factor * shape.width]
        return pool.view(shape.blocks, shape.layers, shape.factor, shape.width)

    worker = type("Worker", (trtllm.KVFerryWorker,), {"memory_at": staticmethod(host_memory)})
    with pytest.raises(UnsupportedMemoryError, match=r"pool cannot be shared: .*use_kv_cache_manager_v2=False there"):
        start_on_gpu(setup, make_pool=make, worker=worker)
    for pool in pools:
        pool.close()


def test_host_and_device_pools_share_kv(start_on_gpu: Start) -> None:
    start_on_gpu(SETUP, make_pool=cuda_pool).run(PROMPT)
    (request,) = start_on_gpu(SETUP).run(PROMPT)
    assert request.matched == 192
