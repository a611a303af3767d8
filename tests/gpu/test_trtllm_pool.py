"""TensorRT-LLM's pool as it is on a GPU: memory of cudaMalloc in a tensor; and the connector in the double over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles.child import Child
from doubles.importing import check_nothing_mapped
from doubles.side import digest, pack
from doubles.trt_blocks import PoolShape
from doubles.trt_fixtures import Start, starting, wait_for_memory, write_model
from doubles.trt_interface import NEW, OLD, Stub, installed
from doubles.trt_memory import cuda_pool
from doubles.trt_modes import MODES, check_mode, told_of
from doubles.trt_requests import Setup, State
from kvferry.cuda.stream import synchronize_device
from kvferry.ipc import IPCPolicy, RawCudaIPCWrapper
from serving.process import Stage, Zygote

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

PROMPT = list(range(1000, 1200))
SETUP = Setup(keeps=False)
SLOW = 50_000_000  # cycles before each write: tens of milliseconds


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, device="cuda", memory_bytes=64 << 20)
    yield made
    made.close()


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    with installed(getattr(request, "param", NEW)) as made:
        yield made


@pytest.fixture
def start(stub: Stub, stage: Stage, tmp_path: Path) -> Iterator[Start]:
    wait_for_memory(stage.url, 64 << 20)
    with starting(stub, write_model(tmp_path / "model"), stage.url) as make:
        yield make


def test_torch_cannot_share_the_pool_and_the_raw_wrapper_can() -> None:
    pool = cuda_pool(Setup(shape=PoolShape(blocks=64)))
    pool.view(torch.int16).copy_(torch.arange(pool.numel(), device="cuda").to(torch.int16).view(pool.shape))
    synchronize_device(0)
    with pytest.raises(RuntimeError):
        pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    assert IPCPolicy().choose(pool) is RawCudaIPCWrapper
    with RawCudaIPCWrapper(pool) as wrapper, Child(fake=False) as other:
        assert (tuple(wrapper.shape), wrapper.dtype) == (tuple(pool.shape), torch.bfloat16)
        opened = other.call("open", name="pool", kind="raw", packed=pack(wrapper))
        assert opened["digest"] == digest(pool)
        pool[5].fill_(2)
        synchronize_device(0)
        assert other.call("read", name="pool")["digest"] == digest(pool)
        other.call("close", name="pool")
    check_nothing_mapped()


@pytest.mark.parametrize("stub", [OLD, NEW], indirect=True)
def test_what_an_engine_computed_its_successor_loads(start: Start, stage: Stage) -> None:
    first = start(SETUP, make_pool=cuda_pool)
    (request,) = first.run(PROMPT)
    first.close()
    assert stage.server.call("mappings")["mapped"] == 0
    second = start(SETUP, make_pool=cuda_pool)
    (again,) = second.run(PROMPT)
    told = told_of([[request], [again]], second, stage.url)
    assert (request.matched, again.matched) == (0, 192), told
    assert again.tokens == request.tokens, told


@pytest.mark.parametrize("name", MODES)
def test_no_mode_meets_wrong_kv(start: Start, stage: Stage, name: str) -> None:
    """The double compares every byte that a forward reads."""
    check_mode(start, MODES[name], stage.url, make_pool=cuda_pool)


def test_stores_read_after_the_forwards_own_stream(start: Start, stage: Stage) -> None:
    """`wait_for_save` is given another stream, on which nothing waits for the forward yet."""
    slow = dataclasses.replace(SETUP, slow_cycles=SLOW, max_tokens=64)
    engine = start(slow, make_pool=cuda_pool)
    going_on = engine.submit(PROMPT)
    engine.step()
    for store in engine.workers[0]._side._stores:
        store.job.wait(20)
    engine.close()
    assert going_on.state is State.CONTEXT
    second = start(SETUP, make_pool=cuda_pool)
    (request,) = second.run(PROMPT)
    assert request.matched == 64, told_of([[going_on], [request]], second, stage.url)


def test_host_and_device_pools_share_kv(start: Start, stage: Stage) -> None:
    before = start(SETUP, make_pool=cuda_pool).run(PROMPT)
    engine = start(SETUP)
    (request,) = engine.run(PROMPT)
    assert request.matched == 192, told_of([before, [request]], engine, stage.url)
