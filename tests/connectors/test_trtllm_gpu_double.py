"""TensorRT-LLM's pool in memory of cudaMalloc, over the driver's double: handles, mappings; no GPU needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles import fake_cuda
from doubles.trt_blocks import PoolShape
from doubles.trt_fixtures import Start, starting, wait_for_memory
from doubles.trt_interface import Stub
from doubles.trt_memory import cuda_pool
from doubles.trt_requests import Setup
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


def test_host_and_device_pools_share_kv(start_on_gpu: Start) -> None:
    start_on_gpu(SETUP, make_pool=cuda_pool).run(PROMPT)
    (request,) = start_on_gpu(SETUP).run(PROMPT)
    assert request.matched == 192
