"""What kind of memory a pointer is, tensors over raw pointers, pinned host memory."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from kvferry.cuda.device import bound, bound_if_any
from kvferry.cuda.driver import Driver, initialised_driver
from kvferry.cuda.functions import MEMORY_TYPE_HOST, HandleType, PointerAttribute

__all__ = [
    "HandleType",
    "MemoryKind",
    "PointerInfo",
    "host_device_pointer",
    "let_device_reach",
    "pointer_info",
    "register_host",
    "tensor_from_pointer",
    "unregister_host",
]


class MemoryKind(enum.Enum):
    """Who made the memory, as far as sharing it goes; the value is how to say that to people."""

    HOST = "pageable host memory"
    PINNED = "pinned host memory"
    LEGACY = "cudaMalloc memory"
    VMM = "CUDA virtual memory (cuMemCreate, torch expandable_segments)"
    POOL = "a CUDA memory pool (cudaMallocAsync)"
    MANAGED = "managed memory (cudaMallocManaged)"


class PointerInfo(NamedTuple):
    """What the driver says of an address.

    `base` and `size` (bytes) are the allocation's, for VMM memory the physical chunk's; `range_base` and `range_size`
    the whole reserved range's. `buffer_id` is unique in this process and never used twice. `device` is -1 for host
    memory.
    """

    kind: MemoryKind
    device: int = -1
    buffer_id: int = 0
    base: int = 0
    size: int = 0
    handle_types: HandleType = HandleType.NONE
    range_base: int = 0
    range_size: int = 0


_HOST = PointerInfo(MemoryKind.HOST)

_ASKED = (
    PointerAttribute.MEMORY_TYPE,
    PointerAttribute.BUFFER_ID,
    PointerAttribute.IS_MANAGED,
    PointerAttribute.DEVICE_ORDINAL,
    PointerAttribute.LEGACY_IPC_CAPABLE,
    PointerAttribute.RANGE_START,
    PointerAttribute.RANGE_SIZE,
    PointerAttribute.ALLOWED_HANDLE_TYPES,
    PointerAttribute.MEMPOOL_HANDLE,
)


def pointer_info(ptr: int) -> PointerInfo:
    """Classify the memory at `ptr`; never begins to use CUDA in a process that does not use it yet.

    Any thread; its current context stays as it was.
    """
    drv = initialised_driver()
    if drv is None:
        return _HOST
    with bound_if_any(drv) as any_context:
        if not any_context:
            return _HOST
        (buffer_id,) = drv.pointer_attributes(ptr, (PointerAttribute.BUFFER_ID,))
        known = drv.allocations.get(buffer_id)
        if isinstance(known, PointerInfo) and known.base <= ptr < known.base + known.size:
            return known
        info = _ask(drv, ptr)
    if info.kind is MemoryKind.LEGACY:
        drv.remember(info.buffer_id, info)
    return info


def _ask(drv: Driver, ptr: int) -> PointerInfo:
    """What the driver says of an address; some context has to be current."""
    values = dict(zip(_ASKED, drv.pointer_attributes(ptr, _ASKED), strict=True))
    kind = _kind(values)
    if kind is MemoryKind.HOST:
        return _HOST
    range_base, range_size = values[PointerAttribute.RANGE_START], values[PointerAttribute.RANGE_SIZE]
    device = -1 if kind is MemoryKind.PINNED else values[PointerAttribute.DEVICE_ORDINAL] & 0xFFFFFFFF
    base, size = range_base, range_size
    if kind in (MemoryKind.LEGACY, MemoryKind.VMM, MemoryKind.POOL):
        base, size = allocation_range(drv, ptr, device)
    known = HandleType.POSIX_FD | HandleType.FABRIC
    return PointerInfo(
        kind=kind,
        device=device,
        buffer_id=values[PointerAttribute.BUFFER_ID],
        base=base,
        size=size,
        handle_types=HandleType(values[PointerAttribute.ALLOWED_HANDLE_TYPES] & known),
        range_base=range_base,
        range_size=range_size,
    )


def _kind(values: dict[PointerAttribute, int]) -> MemoryKind:
    if values[PointerAttribute.IS_MANAGED]:
        return MemoryKind.MANAGED
    memory_type = values[PointerAttribute.MEMORY_TYPE]
    if memory_type == 0:
        return MemoryKind.HOST
    if memory_type == MEMORY_TYPE_HOST:
        return MemoryKind.PINNED
    if values[PointerAttribute.LEGACY_IPC_CAPABLE]:
        return MemoryKind.LEGACY
    return MemoryKind.POOL if values[PointerAttribute.MEMPOOL_HANDLE] else MemoryKind.VMM


def allocation_range(drv: Driver, ptr: int, device: int) -> tuple[int, int]:
    """Base and bytes of the allocation, of VMM memory the physical chunk, that `ptr` lies in."""
    with bound(device):
        return drv.address_range(ptr)


def tensor_from_pointer(ptr: int, nbytes: int, *, device: int, owner: object) -> torch.Tensor:
    """A flat uint8 tensor over device memory, without copying; `owner` lives as long as any view of it."""
    with bound(device) as drv:
        return drv.make_tensor(ptr, nbytes, device, owner)


def let_device_reach(ordinal: int, ptr: int) -> None:
    """Let kernels on a device reach VMM memory of another one, all of the range that is mapped here around `ptr`.

    Raises CudaError where the two GPUs are not connected.
    """
    info = pointer_info(ptr)
    with bound(info.device) as drv:
        drv.set_access(info.range_base, info.range_size, ordinal)


def register_host(address: int, nbytes: int, *, device: int = 0) -> None:
    """Pin host memory for all devices and map it into their address space; takes about 0.5 s a GiB."""
    with bound(device) as drv:
        drv.host_register(address, nbytes)


def unregister_host(address: int, *, device: int = 0) -> None:
    """Undo `register_host`. Nothing may be copying from or to the memory."""
    with bound(device) as drv:
        drv.host_unregister(address)


def host_device_pointer(address: int, *, device: int = 0) -> int:
    """The address at which the device sees pinned host memory."""
    with bound(device) as drv:
        return drv.host_device_pointer(address)


def memory_info(device: int) -> tuple[int, int]:
    """Free and total bytes of the device."""
    with bound(device) as drv:
        return drv.mem_get_info()
