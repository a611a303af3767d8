"""The driver, for real: what the double claims about it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from doubles.fake_memory import map_fd, new_memfd
from doubles.side import in_fresh_thread, pattern
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound, device_uuid, ordinal_of, visible_uuids
from kvferry.cuda.driver import driver
from kvferry.cuda.memory import (
    HandleType,
    MemoryKind,
    host_device_pointer,
    memory_info,
    pointer_info,
    register_host,
    tensor_from_pointer,
    unregister_host,
)
from kvferry.cuda.nvrtc import Module, compile_ptx
from kvferry.cuda.stream import Event, Stream, synchronize_device, wait_value64, write_value64
from kvferry.errors import CudaError, UnknownDeviceError

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def words() -> Iterator[int]:
    """A few zeroed 64-bit words on device 0."""
    with bound(0) as drv:
        address = drv.mem_alloc(2 * MIB)
        drv.memset_async(address, 0, 2 * MIB, 0)
        drv.context_synchronize()
    yield address
    with bound(0) as drv:
        drv.mem_free(address)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_uuids_and_ordinals_agree_with_torch() -> None:
    for ordinal, uuid in enumerate(visible_uuids()):
        assert uuid.endswith(str(torch.cuda.get_device_properties(ordinal).uuid))
        assert ordinal_of(uuid) == ordinal
    assert len(visible_uuids()) == torch.cuda.device_count()
    with pytest.raises(UnknownDeviceError, match=device_uuid(0)):
        ordinal_of("GPU-00000000-0000-0000-0000-000000000000")


def test_kinds_of_memory() -> None:
    assert pointer_info(torch.zeros(8).data_ptr()).kind is MemoryKind.HOST
    assert pointer_info(torch.zeros(8).pin_memory().data_ptr()).kind is MemoryKind.PINNED
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda:0")
    info = pointer_info(tensor.data_ptr() + 100)
    assert (info.kind, info.device, info.handle_types) == (MemoryKind.LEGACY, 0, HandleType.NONE)
    assert info.base <= tensor.data_ptr()
    assert info.base + info.size >= tensor.data_ptr() + 3 * MIB
    with bound(0) as drv:
        managed = drv.mem_alloc_managed(MIB)
    assert pointer_info(managed).kind is MemoryKind.MANAGED
    pool = VmmPool(6 * MIB)
    inside = pointer_info(pool.base + 3 * MIB)
    assert inside.kind is MemoryKind.VMM
    assert inside.handle_types & HandleType.POSIX_FD
    assert (inside.base, inside.size) == (pool.base + 2 * MIB, 2 * MIB)
    assert (inside.range_base, inside.range_size) == (pool.base, 12 * MIB)
    pool.close()
    with bound(0) as drv:
        drv.mem_free(managed)


def test_a_freed_allocations_number_is_not_used_again() -> None:
    numbers = set()
    for _ in range(20):
        with bound(0) as drv:
            address = drv.mem_alloc(4 * MIB)
            numbers.add(pointer_info(address).buffer_id)
            drv.mem_free(address)
    assert len(numbers) == 20


def test_a_fresh_thread_is_left_without_a_context() -> None:
    tensor = torch.zeros(MIB, dtype=torch.uint8, device="cuda:0")

    def work() -> tuple[int, int, MemoryKind]:
        before = driver().current_context()
        kind = pointer_info(tensor.data_ptr()).kind
        view = tensor_from_pointer(tensor.data_ptr(), 16, device=0, owner=tensor)
        assert view.data_ptr() == tensor.data_ptr()
        return before, driver().current_context(), kind

    assert in_fresh_thread(work) == (0, 0, MemoryKind.LEGACY)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, sees {torch.cuda.device_count()}")
def test_the_current_device_is_left_as_it_was() -> None:
    tensor = torch.zeros(MIB, dtype=torch.uint8, device="cuda:0")
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda:1")
        before = driver().current_context()
        assert pointer_info(tensor.data_ptr()).device == 0
        tensor_from_pointer(tensor.data_ptr(), 16, device=0, owner=None)
        assert torch.cuda.current_device() == 1
        assert driver().current_context() == before


def test_a_tensor_over_a_pointer_is_not_a_copy_and_keeps_its_owner(words: int) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    tensor = tensor_from_pointer(words, 64, device=0, owner=owner)
    del owner
    view = tensor[8:16].view(torch.bfloat16)
    view.fill_(1.0)
    synchronize_device(0)
    del tensor
    gc.collect()
    assert alive() is not None
    again = tensor_from_pointer(words, 64, device=0, owner=None)
    assert again[8:16].view(torch.bfloat16).tolist() == [1.0] * 4
    del view
    gc.collect()
    assert alive() is None


def test_looking_at_host_memory_leaves_the_process_free_to_fork() -> None:
    code = """
import os, torch
from kvferry.cuda.memory import pointer_info
assert pointer_info(torch.zeros(8).data_ptr()).kind.name == "HOST"
pid = os.fork()
if pid == 0:
    torch.zeros(1, device="cuda")
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_streams_copy_in_order_and_events_mark_the_end(words: int) -> None:
    with Stream(0) as stream, Event(0) as event:
        stream.memset_async(words, 7, 32)
        stream.memcpy_async(words + 32, words, 8)
        event.record(stream.handle)
        event.synchronize()
        assert event.query()
    assert tensor_from_pointer(words, 48, device=0, owner=None).tolist() == [7] * 40 + [0] * 8


def test_a_stream_waits_for_a_value(words: int) -> None:
    with Stream(0) as held, Stream(0) as free, Event(0) as event:
        wait_value64(held.handle, words, 5, device=0)
        event.record(held.handle)
        try:
            write_value64(free.handle, words, 4, device=0)
            free.synchronize()
            assert not event.query()
        finally:
            write_value64(free.handle, words, 6, device=0)
        assert until(event.query)


def test_values_in_registered_host_memory() -> None:
    mapping, address = map_fd(new_memfd(mmap.PAGESIZE), mmap.PAGESIZE)
    register_host(address, mmap.PAGESIZE)
    assert pointer_info(address).kind is MemoryKind.PINNED
    seen = host_device_pointer(address)
    word = ctypes.c_uint64.from_address(address)
    with Stream(0) as stream, Event(0) as event:
        wait_value64(stream.handle, seen, 1, device=0)
        write_value64(stream.handle, seen + 8, 9, device=0)
        event.record(stream.handle)
        assert not event.query()
        word.value = 1  # the host lets the stream go
        assert until(event.query)
    assert ctypes.c_uint64.from_address(address + 8).value == 9
    unregister_host(address)
    assert pointer_info(address).kind is MemoryKind.HOST
    mapping.close()


def test_an_interprocess_event_gives_a_handle() -> None:
    with Event(0, interprocess=True) as event:
        event.record(0)
        assert len(event.ipc_handle()) == 64


def test_a_kernel_is_compiled_and_launched(words: int) -> None:
    source = """
extern "C" __global__ void fill(unsigned char* out, unsigned n, unsigned char value) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = value;
}
"""
    with Module(compile_ptx(source, 0), 0) as module, Stream(0) as stream:
        args = [ctypes.c_uint64(words), ctypes.c_uint32(1000), ctypes.c_uint8(9)]
        fill = module.function("fill")
        fill.launch((4, 1, 1), (64, 1, 1), stream=stream.handle, args=args)
        stream.synchronize()
    assert tensor_from_pointer(words, 1001, device=0, owner=None).tolist() == [9] * 1000 + [0]
    with pytest.raises(CudaError, match="undeclared_thing"):
        compile_ptx('extern "C" __global__ void f() { undeclared_thing(); }', 0)


def test_calls_release_the_gil(words: int) -> None:
    """A thread that waits in the driver does not hold up the one that would let it go."""
    with Stream(0) as held, Stream(0) as free:
        wait_value64(held.handle, words, 1, device=0)
        waiter = threading.Thread(target=held.synchronize)
        waiter.start()
        time.sleep(0.05)
        write_value64(free.handle, words, 1, device=0)
        waiter.join(timeout=10)
        assert not waiter.is_alive()


def test_virtual_memory_travels_as_a_file_descriptor_within_the_process() -> None:
    pool = VmmPool(4 * MIB)
    pool.tensor()[:64].copy_(pattern(64, 1))
    synchronize_device(0)
    with bound(0) as drv:
        handle = drv.retain_allocation_handle(pool.base)
        assert drv.handle_types_of(handle) == HandleType.POSIX_FD
        drv.mem_release(handle)
        assert drv.granularity(0) == 2 * MIB
    pool.close()
    free, total = memory_info(0)
    assert 0 < free <= total
