from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda.memory import MemoryKind, pointer_info
from kvferry.errors import NotContiguousError, PoolAddressError, PoolFullError, ShareError
from kvferry.p2p.memory_pool import MIN_BLOCK_BYTES, TensorMemoryPool

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[TensorMemoryPool]:
    with TensorMemoryPool(MIB) as made:
        yield made


def test_a_tensor_comes_back_as_it_was(pool: TensorMemoryPool) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        shape = (3, 5, 7)
        tensor = torch.randint(0, 2, shape).to(dtype)
        address = pool.store_tensor(tensor)
        loaded = pool.load_tensor(address, dtype, shape)
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
        pool.free(address)
        assert loaded.data_ptr() != address
    assert pool.used_bytes == 0


@given(st.integers(1, 3 * MIB // MIN_BLOCK_BYTES))
@settings(max_examples=20, deadline=None)
def test_a_pool_of_any_size_can_be_given_out_whole(blocks: int) -> None:
    with TensorMemoryPool(blocks * MIN_BLOCK_BYTES + 100) as pool:
        given_out = []
        while pool.used_bytes < pool.pool_bytes:
            given_out.append(pool.allocate(pool.largest_free_bytes))
        assert pool.pool_bytes == blocks * MIN_BLOCK_BYTES
        assert len(given_out) == bin(blocks).count("1")
        with pytest.raises(PoolFullError):
            pool.allocate(1)
        for address in given_out:
            pool.free(address)
        assert pool.largest_free_bytes == MIN_BLOCK_BYTES << blocks.bit_length() - 1


def test_freed_neighbours_join_so_that_the_whole_can_be_had_again(pool: TensorMemoryPool) -> None:
    addresses = [pool.allocate(MIN_BLOCK_BYTES) for _ in range(MIB // MIN_BLOCK_BYTES)]
    assert pool.num_tensors == len(addresses) == len(set(addresses))
    with pytest.raises(PoolFullError, match="largest free block has 0"):
        pool.allocate(1)
    for address in addresses[::2]:
        pool.free(address)
    assert pool.largest_free_bytes == MIN_BLOCK_BYTES
    with pytest.raises(PoolFullError, match=rf"8192.*{MIB // 2} are in use.*largest free block has 4096"):
        pool.allocate(MIN_BLOCK_BYTES + 1)
    for address in addresses[1::2]:
        pool.free(address)
    pool.free(pool.allocate(MIB))


def test_a_wrong_address_changes_nothing(pool: TensorMemoryPool) -> None:
    address = pool.store_tensor(torch.full((5000,), 7, dtype=torch.uint8))
    free = pool.allocate(1)
    pool.free(free)
    used = pool.used_bytes
    for wrong in (0, -1, address + 1, address + MIN_BLOCK_BYTES, free, free + 64):
        with pytest.raises(PoolAddressError, match="never given out, or freed already"):
            pool.free(wrong)
        with pytest.raises(PoolAddressError):
            pool.load_tensor(wrong, torch.uint8, (1,))
    assert pool.used_bytes == used == 8 * KIB
    assert torch.equal(pool.load_tensor(address, torch.uint8, (5000,)), torch.full((5000,), 7, dtype=torch.uint8))
    pool.free(address)
    with pytest.raises(PoolAddressError):
        pool.free(address)


def test_another_number_of_bytes_is_refused(pool: TensorMemoryPool) -> None:
    address = pool.store_tensor(torch.zeros(10))
    for shape in ((11,), (9,), (10, 2), ()):
        with pytest.raises(ValueError, match="40 bytes"):
            pool.load_tensor(address, torch.float32, shape)


def test_what_is_no_dense_run_is_refused_and_takes_nothing(pool: TensorMemoryPool) -> None:
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(0), torch.zeros(8)[::2]):
        with pytest.raises(NotContiguousError):
            pool.store_tensor(tensor)
    with pytest.raises(PoolFullError):
        pool.store_tensor(torch.zeros(MIB))
    with pytest.raises(ValueError, match="at least one byte"):
        pool.allocate(0)
    assert pool.used_bytes == 0


def test_a_pool_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for one block"):
        TensorMemoryPool(MIN_BLOCK_BYTES - 1)


def test_closing_is_idempotent_and_ends_everything() -> None:
    pool = TensorMemoryPool(MIB)
    address = pool.allocate(10)
    view = pool.view(address)
    pool.close()
    pool.close()
    view.fill_(3)  # a tensor keeps the memory that it is a view of
    for call in (lambda: pool.free(address), lambda: pool.view(address)):
        with pytest.raises(PoolAddressError, match="closed"):
            call()
    with pytest.raises(PoolFullError, match="closed"):
        pool.allocate(1)
    assert "closed" in repr(pool)


def test_one_that_is_not_closed_is_warned_about() -> None:
    pool = TensorMemoryPool(MIB)
    with pytest.warns(ResourceWarning, match="was not closed"):
        pool.__del__()
    pool.close()


def test_threads_get_memory_of_their_own(pool: TensorMemoryPool) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for length in range(1, 120):
            tensor = torch.full((length * 97,), number, dtype=torch.uint8)
            address = pool.store_tensor(tensor)
            if not torch.equal(pool.load_tensor(address, torch.uint8, tensor.shape), tensor):
                wrong.append(number)
            pool.free(address)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not wrong
    assert (pool.used_bytes, pool.largest_free_bytes) == (0, MIB)


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver


def test_with_a_device_all_of_it_is_pinned_and_none_after(double: FakeDriver) -> None:
    with TensorMemoryPool(3 * MIB, device=0) as pool:
        first, second = pool.allocate(2 * MIB), pool.allocate(MIB)
        for address in (first, first + 2 * MIB - 1, second, second + MIB - 1):
            assert pointer_info(address).kind is MemoryKind.PINNED
        assert "pinned" in repr(pool)
    assert not double.fake.allocations


def test_no_copy_spans_two_pinned_pieces(double: FakeDriver) -> None:
    with TensorMemoryPool(7 * MIB, device=0) as pool:
        for size in (4 * MIB, 2 * MIB, MIB):
            address = pool.allocate(size)
            info = pointer_info(address)
            assert info.base <= address < address + size <= info.base + info.size


def test_what_cannot_be_pinned_is_an_error_that_names_the_limit_and_leaves_nothing(double: FakeDriver) -> None:
    double.fake.failures["cuMemHostRegister_v2"] = [0, 1]
    with pytest.raises(ShareError, match=r"1048576 bytes of a pool of 3145728 cannot be pinned.*memlock"):
        TensorMemoryPool(3 * MIB, device=0)
    assert not double.fake.allocations


def test_memory_is_where_it_says(pool: TensorMemoryPool) -> None:
    address = pool.allocate(100)
    ctypes.memset(address, 9, 100)
    assert pool.view(address).tolist() == [9] * 100
