"""DeviceWorker and its parts without a server: devices that fail, memory in pieces, a loop that is posted to."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from kvferry.client.proofs import Nonces
from kvferry.client.storages import Storages
from kvferry.copy import HostCopier
from kvferry.errors import CudaError, RequestError, UnknownDeviceError
from kvferry.ipc.wire import encode_descriptors, fd_slots
from kvferry.server.memory import GUARD_BYTES, Memory
from kvferry.server.net.loop import READ, Loop
from kvferry.server.work.copies import CopyQueue
from kvferry.server.work.device import HostDevice
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import (
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
from kvferry.server.work.worker import DeviceWorker
from kvferry.server.work.workers import Workers
from serving.storages import storages_of

BLOCKS_A_CHUNK = 4


def ids(blocks: Iterable[int]) -> bytes:
    return torch.tensor(list(blocks), dtype=torch.int32).numpy().tobytes()


class Bench:
    """A worker whose completions go into a queue, and one cache for it."""

    def __init__(self, make_device: Callable[[], Any], memory_bytes: int = 1 << 20) -> None:
        self.memory = Memory(memory_bytes)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.worker = DeviceWorker("test", make_device, memory_address=self.memory.address, post=self.completions.put)
        self.worker.start()
        self.cache = torch.arange(2 * 8 * 16 * 2 * 8, dtype=torch.float32).view(2, 8, 16, 2, 8)
        self.storages: Storages = storages_of({"a": self.cache})

    def next(self) -> Completion:
        return self.completions.get(timeout=10)

    def open_task(self, cache_id: int = 1) -> OpenTask:
        return OpenTask(cache_id, self.storages.layout, "", encode_descriptors(self.storages.wrappers), 1, b"", 0)

    def fds_task(self, cache_id: int = 1) -> FdsTask:
        return FdsTask(cache_id, tuple(wrapper.export_fd(i) for wrapper, i in fd_slots(self.storages.wrappers)))

    def copy_task(self, job_id: int, **changes: Any) -> CopyTask:
        fields: dict[str, Any] = {
            "cache_id": 1,
            "job_id": job_id,
            "direction": Direction.GATHER,
            "block_ids": ids((3, 1, 2, 0)),
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
        def steps(self, *_: Any, **__: Any) -> Any:
            raise CudaError("cuStreamSynchronize", 700, "illegal address", 0)

    def __init__(self) -> None:
        super().__init__()
        self.copiers = dict.fromkeys(Direction, self._Copier())

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


def test_a_device_that_failed_is_tried_again_for_the_next_cache() -> None:
    attempts: list[int] = []

    def make() -> HostDevice:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("not a KVFerryError")
        return HostDevice()

    bench = Bench(make)
    try:
        bench.worker.submit(bench.open_task(1))
        opened = bench.next()
        assert isinstance(opened, CacheOpened)
        assert opened.failure is not None
        bench.worker.submit(bench.open_task(2))
        assert bench.next() == FdsTaken(2, 0)
        bench.worker.submit(CloseTask(1))  # of the cache that was refused
        assert bench.next() == CacheClosed(1)
        bench.worker.submit(CloseTask(2))
        assert bench.next() == CacheClosed(2)
    finally:
        bench.close()


def test_only_devices_that_are_there_get_workers() -> None:
    memory = Memory(1 << 16)
    posted: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    workers = Workers(lambda _: HostDevice(), no_device, ("GPU-1",), memory_address=memory.address, post=posted.put)
    try:
        assert workers.get("") is workers.get("")
        assert workers.get("GPU-1") is workers.get("GPU-1")
        with pytest.raises(RequestError, match="serves the GPUs GPU-1, not GPU-2"):
            workers.get("GPU-2")
    finally:
        assert workers.stop(5) == []
        memory.close()


def test_a_cache_that_cannot_be_opened_harms_nobody_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: OpenedCache) -> tuple[bytes, ...]:
        raise OverflowError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(OpenedCache, "finish", broken)
        bench.worker.submit(bench.open_task(9))
        assert bench.next() == FdsTaken(9, 0)
        bench.worker.submit(bench.fds_task(9))
        assert bench.next() == FdsTaken(9, 1)
        opened = bench.next()
    assert isinstance(opened, CacheOpened)
    assert opened.failure is not None
    assert "nobody thought" in opened.failure.text
    bench.worker.submit(CloseTask(9))
    assert bench.next() == CacheClosed(9)
    bench.open()


def test_a_cache_with_many_jobs_takes_turns_with_others(bench: Bench) -> None:
    bench.open()
    order: list[int] = []

    class Slow(HostDevice):
        step_bytes = 1

    copies = CopyQueue(
        bench.worker._caches, memory_address=bench.memory.address, post=lambda done: order.append(done.job_id)
    )
    bench.worker._caches[2] = bench.worker._caches[1]
    for job_id in range(10, 15):
        copies.add(bench.copy_task(job_id, offsets=(0, 4096 * 16), block_ids=ids(range(8))))
    copies.add(bench.copy_task(20, cache_id=2))
    copies.add(bench.copy_task(30, direction=Direction.SCATTER))
    device = Slow()
    while copies.wait_s == 0.0:
        copies.step(device)
    del bench.worker._caches[2]
    assert order == [30, 20, 10, 11, 12, 13, 14], "no turn waits for another cache, and none for the other direction"


def test_memory_comes_in_pieces_that_do_not_touch() -> None:
    memory = Memory((5 << 12) - 4095, piece_bytes=2 << 12)
    assert [nbytes for _, nbytes in memory.pieces] == [2 << 12, 2 << 12, 1 << 12]
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
