from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator

import pytest
import torch

from doubles.fake_cuda import FakeDriver, installed
from doubles.fake_memory import map_fd, new_memfd
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound
from kvferry.cuda.driver import set_driver_for_testing
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
from kvferry.errors import CudaError


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed((0, 1)) as driver:
        yield driver


def test_host_memory_is_host_with_and_without_a_driver(double: FakeDriver) -> None:
    tensor = torch.zeros(8)
    assert pointer_info(tensor.data_ptr()).kind is MemoryKind.HOST
    set_driver_for_testing(None)
    assert pointer_info(tensor.data_ptr()).kind is MemoryKind.HOST


def test_looking_at_host_memory_begins_no_context(double: FakeDriver) -> None:
    pointer_info(torch.zeros(8).data_ptr())
    assert not double.fake.active


def test_an_interior_pointer_gives_its_allocation(double: FakeDriver) -> None:
    with bound(1) as drv:
        address = drv.mem_alloc(4096)
    info = pointer_info(address + 100)
    assert (info.kind, info.device, info.base, info.size) == (MemoryKind.LEGACY, 1, address, 4096)
    assert info.buffer_id > 0


@pytest.mark.parametrize(
    ("kind", "expected"), [("managed", MemoryKind.MANAGED), ("pool", MemoryKind.POOL), ("legacy", MemoryKind.LEGACY)]
)
def test_kinds_are_told_apart(double: FakeDriver, kind: str, expected: MemoryKind) -> None:
    with bound(0):
        address = double.fake.allocate(1024, kind)
    assert pointer_info(address).kind is expected


def test_virtual_memory_gives_its_chunk_and_its_range(double: FakeDriver) -> None:
    pool = VmmPool(6 << 20, device=0)
    info = pointer_info(pool.base + (3 << 20))
    assert info.kind is MemoryKind.VMM
    assert (info.base, info.size) == (pool.base + (2 << 20), 2 << 20)
    assert (info.range_base, info.range_size) == (pool.base, 12 << 20)
    assert info.handle_types == HandleType.POSIX_FD
    pool.close()
    assert not double.fake.reservations


def test_a_freed_allocations_number_is_not_used_again(double: FakeDriver) -> None:
    numbers = set()
    for _ in range(5):
        with bound(0) as drv:
            address = drv.mem_alloc(4096)
            numbers.add(pointer_info(address).buffer_id)
            drv.mem_free(address)
    assert len(numbers) == 5


def test_a_tensor_over_a_pointer_keeps_its_owner_while_any_view_lives(double: FakeDriver) -> None:
    class Owner:
        pass

    with bound(0) as drv:
        address = drv.mem_alloc(64)
    owner = Owner()
    alive = weakref.ref(owner)
    tensor = tensor_from_pointer(address, 64, device=0, owner=owner)
    del owner
    view = tensor[8:16].view(torch.bfloat16)
    assert view.data_ptr() == address + 8
    del tensor
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_registered_host_memory_is_pinned_until_it_is_unregistered(double: FakeDriver) -> None:
    mapping, address = map_fd(new_memfd(mmap.PAGESIZE), mmap.PAGESIZE)
    register_host(address, mmap.PAGESIZE)
    assert pointer_info(address + 8).kind is MemoryKind.PINNED
    assert pointer_info(address).device == -1
    assert host_device_pointer(address) == address
    with pytest.raises(CudaError):
        register_host(address, mmap.PAGESIZE)
    unregister_host(address)
    assert pointer_info(address).kind is MemoryKind.HOST
    mapping.close()


def test_free_memory_goes_down_and_up(double: FakeDriver) -> None:
    free, total = memory_info(0)
    with bound(0) as drv:
        address = drv.mem_alloc(1 << 20)
        assert memory_info(0) == (free - (1 << 20), total)
        drv.mem_free(address)
    assert memory_info(0) == (free, total)
