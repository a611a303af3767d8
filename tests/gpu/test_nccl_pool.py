"""The pool of pinned memory, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kvferry.cuda.memory import MemoryKind, pointer_info
from kvferry.cuda.stream import Stream
from kvferry.p2p.memory_pool import TensorMemoryPool

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_tensors_go_there_and_back() -> None:
    with TensorMemoryPool(48 * MIB, device=0) as pool:
        kept = []
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int32):
            tensor = torch.randint(0, 100, (1024, 1024), device="cuda:0").to(dtype)
            kept.append((pool.store_tensor(tensor), tensor))
        for address, tensor in kept:
            assert pointer_info(address).kind is MemoryKind.PINNED
            loaded = pool.load_tensor(address, tensor.dtype, tensor.shape, "cuda:0")
            assert loaded.device == tensor.device
            assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
            pool.free(address)
        assert pool.used_bytes == 0
    assert pointer_info(kept[0][0]).kind is not MemoryKind.PINNED


def test_the_driver_copies_over_the_whole_of_a_block() -> None:
    """Also over blocks of different pinned pieces, one after the other."""
    source = torch.randint(0, 256, (32 * MIB,), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    with TensorMemoryPool(56 * MIB, device=0) as pool, Stream(0) as stream:
        for nbytes in (32 * MIB, 16 * MIB, 8 * MIB):
            address = pool.allocate(nbytes)
            stream.memcpy_async(address, source.data_ptr(), nbytes)
            stream.synchronize()
            assert torch.equal(pool.view(address), source[:nbytes].cpu())
        assert pool.largest_free_bytes == 0
