"""When mappings and memory go: closes, kills, frees, forks, many threads; over the real driver."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from doubles.child import Child
from doubles.importing import check_nothing_mapped, free_bytes, opened, until
from doubles.side import digest, pattern
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.errors import ShareError, StaleHandleError
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.table import process_table

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def exporter() -> Iterator[Child]:
    """A process with 64 MiB of plain cudaMalloc memory, "pool", and 64 MiB of torch's, "torch", on device 0."""
    with Child(fake=False) as child:
        child.call("alloc", name="pool", nbytes=64 * MIB)
        child.call("alloc", name="torch", nbytes=64 * MIB, kind="torch")
        yield child


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    check_nothing_mapped()


def test_open_twice_close_one(exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="int32", shape=[256], seed=9)
    first, second = opened(exported), opened(exported)
    first.to_tensor()
    tensor = second.to_tensor()
    first.close()
    first.close()
    process_table().mappings.drain()
    assert digest(tensor) == exported["digest"]
    second.close()
    process_table().mappings.drain()
    assert digest(tensor) == exported["digest"]
    del tensor


def test_four_threads_open_read_and_close_a_thousand_times(exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=256, dtype="uint8", shape=[4], seed=3)
    expected = pattern(4, 3).tolist()
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(1000):
                with opened(exported) as wrapper:
                    if wrapper.to_tensor().tolist() != expected:
                        wrong.append("bytes")
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=45)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_remade_allocation_never_meets_the_old_mapping(exporter: Child) -> None:
    exporter.call("alloc", name="first", nbytes=32 * MIB)
    exported = exporter.call("wrap", name="old", memory="first", start=0, dtype="uint8", shape=[4096], seed=5)
    old = opened(exported)
    tensor = old.to_tensor()
    assert digest(tensor) == exported["digest"]
    exporter.call("forget", name="old")
    exporter.call("free", name="first")
    exporter.call("alloc", name="second", nbytes=32 * MIB)
    again = exporter.call("wrap", name="new", memory="second", start=0, dtype="uint8", shape=[4096], seed=6)
    # Where the driver gives the same handle again, it is refused while the old mapping is in use.
    with opened(again) as early, contextlib.suppress(StaleHandleError):
        assert digest(early.to_tensor()) == again["digest"]
    del tensor
    old.close()
    with opened(again) as late:
        assert digest(late.to_tensor()) == again["digest"]
    exporter.call("forget", name="new")
    exporter.call("free", name="second")


def test_memory_is_back_after_close_when_the_exporter_was_killed() -> None:
    with Child(fake=False) as child:
        child.call("alloc", name="pool", nbytes=4 * GIB)
        exported = child.call("wrap", name="w", memory="pool", start=GIB, dtype="uint8", shape=[MIB], seed=4)
        wrapper = opened(exported)
        tensor = wrapper.to_tensor()
        with_mapping = free_bytes()
        child.kill()
        assert digest(tensor) == exported["digest"]
        assert free_bytes() < with_mapping + 3 * GIB  # it stays while it is mapped
        begun = time.monotonic()
        del tensor
        wrapper.close()
        process_table().mappings.drain()
        assert until(lambda: free_bytes() >= with_mapping + 4 * GIB - 64 * MIB, within_s=5)
        assert time.monotonic() - begun < 0.5
        with opened(exported) as late, pytest.raises(ShareError, match="pid namespace"):
            late.to_tensor()


def test_memory_is_back_after_close_when_the_exporter_freed_it(exporter: Child) -> None:
    before = free_bytes()
    exporter.call("alloc", name="freed", nbytes=GIB)
    exported = exporter.call("wrap", name="w", memory="freed", start=0, dtype="uint8", shape=[64])
    with opened(exported) as wrapper:
        tensor = wrapper.to_tensor()
        exporter.call("forget", name="w")
        exporter.call("free", name="freed")
        del tensor
    process_table().mappings.drain()
    assert until(lambda: free_bytes() >= before - 64 * MIB, within_s=5)


def test_in_its_own_process_a_freed_allocation_is_refused() -> None:
    with bound(0) as drv:
        address = drv.mem_alloc(4 * MIB)
    exported = RawCudaIPCWrapper(tensor_from_pointer(address, 4 * MIB, device=0, owner=None))
    descriptor = exported.descriptor
    exported.close()
    with bound(0) as drv:
        drv.mem_free(address)
        again = drv.mem_alloc(4 * MIB)
    with RawCudaIPCWrapper.from_descriptor(descriptor) as wrapper, pytest.raises(StaleHandleError):
        wrapper.to_tensor()
    with bound(0) as drv:
        drv.mem_free(again)


def test_a_forked_importer_has_its_own_token_and_no_cuda(exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    with Child(fake=False) as importer:
        importer.call("open", name="w", kind="raw", packed=exported["packed"])
        seen = importer.call("fork")
        assert seen["token"] != importer.call("token")["token"]
        assert (seen["mapped"], seen["kind"]) == (0, "CudaUnavailableError")
        assert importer.call("read", name="w")["digest"] == exported["digest"]
        importer.call("close", name="w")
