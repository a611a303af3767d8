"""Pools of a `FakeTrtExecutor`, and their description as V2 gives it: regions of page slots."""

from __future__ import annotations

import contextlib
import ctypes
import math
from types import SimpleNamespace
from typing import Any

import torch

from doubles.trt_requests import Setup
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.errors import CudaError
from kvferry.ipc import allocate_shared


def new_pool(setup: Setup) -> torch.Tensor:
    """A pool `[blocks, layers, factor, width]` of host memory; of V2 in memory that can be shared where it is."""
    shape = (setup.shape.blocks, setup.shape.layers, setup.shape.factor, setup.shape.width)
    if setup.v2:
        return allocate_shared(shape, torch.bfloat16)
    return torch.zeros(shape, dtype=torch.bfloat16)


class _Freed:
    """Frees memory of the driver when nobody has a tensor over it any more.

    That may be after the test, when another double is the driver, which has other memory at the address.
    """

    def __init__(self, driver: Driver, address: int) -> None:
        self._driver = driver
        self._address = address

    def __del__(self) -> None:
        with contextlib.suppress(CudaError), bound(0) as driver:
            if driver is self._driver:
                driver.mem_free(self._address)


def cuda_pool(setup: Setup) -> torch.Tensor:
    """The same in memory of cudaMalloc, of which torch's allocator knows nothing, as `at::for_blob` wraps it."""
    shape = (setup.shape.blocks, setup.shape.layers, setup.shape.factor, setup.shape.width)
    nbytes = math.prod(shape) * torch.bfloat16.itemsize
    with bound(0) as driver:  # small allocations may share a page, and with it a handle
        address = driver.mem_alloc(max(nbytes, 4 << 20))
    flat = tensor_from_pointer(address, nbytes, device=0, owner=_Freed(driver, address))
    return flat.zero_().view(torch.bfloat16).view(shape)


def host_memory(base: int, nbytes: int) -> torch.Tensor:
    """The bytes at an address of this process."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(base), dtype=torch.uint8)


def layout_over(pool: torch.Tensor, setup: Setup) -> Any:
    """V2's layout: a page slot is a block; its first layer is a region, all others together are another."""
    layer_bytes = pool.stride(1) * pool.element_size()
    stride = pool.stride(0) * pool.element_size()
    parts = [range(1), range(1, setup.shape.layers)]
    roles = ["key", "value"][: setup.shape.factor]
    regions = [
        SimpleNamespace(
            base=pool.data_ptr() + part.start * layer_bytes,
            size=len(part) * layer_bytes,
            stride=stride,
            num_slots=setup.shape.blocks,
            buffers=tuple(SimpleNamespace(layer_id=layer, role=role, expansion=1) for layer in part for role in roles),
        )
        for part in parts
        if part
    ]
    group = SimpleNamespace(
        layer_group_id=0,
        layer_ids=tuple(range(setup.shape.layers)),
        window_size=setup.window,
        regions=tuple(regions),
        replicated_regions=(),
    )
    return SimpleNamespace(tokens_per_block=setup.shape.tokens, groups=(group,), gpu_pool_mapping_bytes=None)
