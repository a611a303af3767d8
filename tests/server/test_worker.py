"""DeviceWorker and its parts without a server: devices that fail, memory in pieces, a loop that is posted to."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.client.storages import Nonces, Storages, prepare_storages
from kvferry.copy import HostCopier
from kvferry.errors import CudaError, RequestError, UnknownDeviceError
from kvferry.ipc import IPCPolicy
from kvferry.ipc.wire import encode_descriptors, fd_slots
from kvferry.server.device import HostDevice
from kvferry.server.loop import READ, Loop
from kvferry.server.memory import GUARD_BYTES, Memory
from kvferry.server.tasks import (
    CacheClosed,
    CacheOpened,
    CloseTask,
    Completion,
    CopyDone,
    CopyTask,
    Direction,
    FdsTaken,
    FdsTask,
    MemoryReady,
    OpenTask,
    PrepareTask,
    WorkerFailed,
)
from kvferry.server.worker import DeviceWorker
from kvferry.server.workers import Workers

BLOCKS_A_CHUNK = 4


class Bench:
    """A worker whose completions go into a queue, and one cache for it."""

    def __init__(self, make_device: Callable[[], Any], memory_bytes: int = 1 << 20) -> None:
        self.memory = Memory(memory_bytes)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.worker = DeviceWorker("test", make_device, memory_address=self.memory.address, post=self.completions.put)
        self.worker.start()
        self.cache = torch.arange(2 * 8 * 16 * 2 * 8, dtype=torch.float32).view(2, 8, 16, 2, 8)
        self.storages: Storages = prepare_storages(
            {"a": self.cache}, format="vllm_flash_attention", hints=None, policy=IPCPolicy()
        )

    def next(self) -> Completion:
        return self.completions.get(timeout=10)

    def open_task(self, cache_id: int = 1) -> OpenTask:
        return OpenTask(cache_id, self.storages.layout, "", encode_descriptors(self.storages.wrappers), 1, b"", 0)

    def fds_task(self, cache_id: int = 1) -> FdsTask:
        return FdsTask(cache_id, tuple(wrapper.export_fd(i) for wrapper, i in fd_slots(self.storages.wrappers)))

    def copy_task(self, job_id: int, **changes: Any) -> CopyTask:
        ids = torch.tensor([3, 1, 2, 0], dtype=torch.int32).numpy().tobytes()
        fields: dict[str, Any] = {
            "cache_id": 1,
            "job_id": job_id,
            "direction": Direction.GATHER,
            "block_ids": ids,
            "offsets": (0,),
            "skip_blocks": 0,
            "ticket": None,
            "deadline": time.monotonic() + 10,
        }
        return CopyTask(**{**fields, **changes})

    def open(self) -> CacheOpened:
        self.worker.submit(self.open_task())
        assert self.next() == FdsTaken(1, 0)
        with Nonces(self.storages) as nonces:
            self.worker.submit(self.fds_task())
            assert self.next() == FdsTaken(1, 1)
            opened = self.next()
            assert isinstance(opened, CacheOpened)
            nonces.check(opened.nonces)
        return opened

    def close(self) -> None:
        self.worker.stop()
        self.storages.close()
        self.memory.close()


@pytest.fixture
def bench() -> Any:
    made = Bench(HostDevice)
    yield made
    made.close()


def test_a_cache_is_opened_copied_and_closed(bench: Bench) -> None:
    bench.worker.submit(PrepareTask(0, 1 << 20))
    assert bench.next() == MemoryReady(0, 1 << 20)
    bench.open()
    before = bench.cache.clone()
    bench.worker.submit(bench.copy_task(7))
    assert bench.next() == CopyDone(1, 7, 1)
    bench.cache.zero_()
    bench.worker.submit(bench.copy_task(8, direction=Direction.SCATTER, skip_blocks=1))
    assert bench.next() == CopyDone(1, 8, 1)
    assert torch.equal(bench.cache[:, :3], before[:, :3])
    assert not bench.cache[:, 3:].any()
    bench.worker.submit(CloseTask(1))
    assert bench.next() == CacheClosed(1)
    bench.worker.submit(bench.copy_task(9))
    done = bench.next()
    assert isinstance(done, CopyDone)
    assert done.failure is not None
    assert done.failure.code == "cancelled"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"block_ids": torch.tensor([0, 1, 2, 8], dtype=torch.int32).numpy().tobytes()}, "block_ids"),
        ({"deadline": 0.0}, "deadline"),
    ],
)
def test_copies_that_cannot_be_done_say_why(bench: Bench, changes: dict[str, Any], code: str) -> None:
    bench.open()
    bench.worker.submit(bench.copy_task(7, **changes))
    done = bench.next()
    assert isinstance(done, CopyDone)
    assert done.failure is not None
    assert (done.num_chunks, done.failure.code) == (0, code)


def test_descriptors_that_do_not_fit_are_closed_and_the_cache_is_refused(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2):
        wrong = os.open("/dev/null", os.O_RDWR) if number else os.memfd_create("x")
        bench.worker.submit(bench.open_task())
        assert bench.next() == FdsTaken(1, 0)
        bench.worker.submit(FdsTask(1, (wrong,)))
        opened = bench.next()
        assert isinstance(opened, CacheOpened)
        assert opened.failure is not None
        assert opened.failure.code == "share"
    bench.worker.submit(bench.fds_task(cache_id=99))
    bench.worker.submit(CloseTask(99))
    assert bench.next() == CacheClosed(99)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_registration_says_must_agree(bench: Bench) -> None:
    good = bench.open_task()
    for task, code in (
        (OpenTask(1, good.layout, "GPU-x", good.wrappers, 1, b"", 0), "layout"),
        (OpenTask(1, good.layout, "", good.wrappers, 2, b"", 0), "wire"),
        (OpenTask(1, good.layout, "", b"junk", 1, b"", 0), "wire"),
    ):
        bench.worker.submit(task)
        opened = bench.next()
        assert isinstance(opened, CacheOpened)
        assert opened.failure is not None
        assert opened.failure.code == code


class Broken(HostDevice):
    """A device whose context is lost at the first copy."""

    class _Copier(HostCopier):
        def gather(self, *_: Any) -> None:
            raise CudaError("cuStreamSynchronize", 700, "illegal address", 0)

    def __init__(self) -> None:
        super().__init__()
        self.copier = self._Copier()

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, CudaError)


def test_a_device_that_is_lost_ends_the_job_and_then_the_worker() -> None:
    bench = Bench(Broken)
    try:
        bench.open()
        bench.worker.submit(bench.copy_task(7))
        done, failed = bench.next(), bench.next()
        assert isinstance(done, CopyDone)
        assert done.failure is not None
        assert done.failure.code == "cuda"
        assert isinstance(failed, WorkerFailed)
        assert "illegal address" in failed.text
    finally:
        bench.close()


def no_device(_uuid: str = "") -> Any:
    raise UnknownDeviceError("GPU-1 is not visible")


def test_a_device_that_cannot_be_had_refuses_all_that_comes() -> None:
    bench = Bench(no_device)
    try:
        bench.worker.submit(bench.open_task())
        opened = bench.next()
        assert isinstance(opened, CacheOpened)
        assert opened.failure is not None
        assert opened.failure.code == "device"
        bench.worker.submit(bench.fds_task())
        bench.worker.submit(bench.copy_task(3))
        assert isinstance(bench.next(), CopyDone)
        bench.worker.submit(CloseTask(1))
        assert bench.next() == CacheClosed(1)
        bench.worker.submit(PrepareTask(0, 4096))
        assert isinstance(bench.next(), WorkerFailed)
    finally:
        bench.close()


def test_workers_that_failed_are_replaced_and_their_number_is_bounded() -> None:
    memory = Memory(1 << 16)
    posted: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    workers = Workers(lambda _: HostDevice(), no_device, memory_address=memory.address, post=posted.put)
    try:
        first = workers.get("GPU-1")
        deadline = time.monotonic() + 5
        while not first.failed and time.monotonic() < deadline:
            time.sleep(0.001)
        assert workers.get("GPU-1") is not first
        assert workers.get("") is workers.get("")
        for number in range(2, 32):
            workers.get(f"GPU-{number}")
        with pytest.raises(RequestError, match="32 devices"):
            workers.get("GPU-32")
    finally:
        assert workers.stop(5) == []
        memory.close()


def test_memory_comes_in_pieces_that_do_not_touch() -> None:
    memory = Memory(5000, piece_bytes=2048)
    assert [nbytes for _, nbytes in memory.pieces] == [2048, 2048, 904]
    ends = [offset + nbytes for offset, nbytes in memory.pieces]
    starts = [offset for offset, _ in memory.pieces]
    assert all(start - end >= GUARD_BYTES for start, end in zip(starts[1:], ends, strict=False))
    memory.close()
    memory.close()


def test_a_loop_is_posted_to_and_watches() -> None:
    items: list[int] = []
    loop: Loop[int] = Loop(items.append, lambda _: 1.0)
    read_end, write_end = os.pipe()
    seen: list[bytes] = []

    def on_ready(_events: int) -> None:
        seen.append(os.read(read_end, 10))
        loop.forget(read_end)
        loop.forget(read_end)
        loop.stop()

    loop.watch(read_end, READ, on_ready)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for number in range(100):
        loop.post(number)
    os.write(write_end, b"x")
    thread.join(5)
    assert not thread.is_alive()
    assert seen == [b"x"]
    assert items == list(range(100))
    loop.close()
    os.close(read_end)
    os.close(write_end)
