"""Typed calls about memory: allocations, attributes, inter-process handles, virtual memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from kvferry.cuda.calls import Library
from kvferry.cuda.functions import (
    ACCESS_READ_WRITE,
    ALLOCATION_PINNED,
    GRANULARITY_MINIMUM,
    HOST_REGISTER_DEVICEMAP,
    HOST_REGISTER_PORTABLE,
    IPC_LAZY_PEER_ACCESS,
    LOCATION_DEVICE,
    AccessDescriptor,
    AllocationProperties,
    HandleType,
    IpcHandle,
    Location,
    PointerAttribute,
)


class MemoryCalls(Library):
    """Addresses are ints, sizes are bytes. Unless said otherwise a context has to be current."""

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def mem_alloc(self, nbytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def mem_free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def mem_alloc_managed(self, nbytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAllocManaged", byref(address), nbytes, 1)
        return address.value

    def address_range(self, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation (of VMM memory: the physical chunk) that `address` lies in."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def pointer_attributes(self, address: int, attributes: Sequence[PointerAttribute]) -> list[int]:
        """The attributes' values; all 0 for memory that CUDA does not know."""
        # Every attribute asked for here is at most 8 bytes wide and little-endian, so zeroed words hold any of them.
        values = (c_uint64 * len(attributes))()
        places = (c_void_p * len(attributes))(*(ctypes.addressof(values) + 8 * i for i in range(len(attributes))))
        names = (c_int * len(attributes))(*attributes)
        self.call("cuPointerGetAttributes", len(attributes), names, places, address)
        return list(values)

    def host_register(self, address: int, nbytes: int) -> None:
        self.call("cuMemHostRegister_v2", address, nbytes, HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP)

    def host_unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        pointer = c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
        return pointer.value

    def ipc_get_mem_handle(self, base: int) -> bytes:
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle.data)

    def ipc_open_mem_handle(self, handle: bytes) -> int:
        """Map the allocation into this process; returns its base."""
        address = c_uint64()
        packed = IpcHandle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", byref(address), packed, IPC_LAZY_PEER_ACCESS)
        return address.value

    def ipc_close_mem_handle(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address)


class VmmCalls(Library):
    """Virtual memory: allocations are handles (ints), mapped into reserved address ranges. No context is needed."""

    def mem_create(self, nbytes: int, device: int, handle_types: HandleType = HandleType.POSIX_FD) -> int:
        """A physical allocation of `nbytes`, a multiple of the granularity."""
        handle = c_uint64()
        properties = allocation_properties(device, handle_types)
        self.call("cuMemCreate", byref(handle), nbytes, byref(properties), 0, device=device)
        return handle.value

    def mem_release(self, handle: int) -> None:
        self.call("cuMemRelease", handle)

    def retain_allocation_handle(self, address: int) -> int:
        """The handle of the physical allocation mapped at `address`, to be released by the caller."""
        handle = c_uint64()
        self.call("cuMemRetainAllocationHandle", byref(handle), address)
        return handle.value

    def export_posix_fd(self, handle: int) -> int:
        """A new file descriptor for the allocation; the caller closes it."""
        fd = c_int(-1)
        self.call("cuMemExportToShareableHandle", byref(fd), handle, int(HandleType.POSIX_FD), 0)
        return fd.value

    def import_posix_fd(self, fd: int) -> int:
        """The allocation behind `fd`, which stays the caller's to close."""
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), fd, int(HandleType.POSIX_FD))
        return handle.value

    def export_fabric(self, handle: int) -> bytes:
        fabric = IpcHandle()
        self.call("cuMemExportToShareableHandle", byref(fabric), handle, int(HandleType.FABRIC), 0)
        return bytes(fabric.data)

    def import_fabric(self, fabric: bytes) -> int:
        handle = c_uint64()
        packed = IpcHandle.from_buffer_copy(fabric)
        self.call("cuMemImportFromShareableHandle", byref(handle), byref(packed), int(HandleType.FABRIC))
        return handle.value

    def handle_types_of(self, handle: int) -> HandleType:
        """How the allocation was made to be shared."""
        properties = AllocationProperties()
        self.call("cuMemGetAllocationPropertiesFromHandle", byref(properties), handle)
        known = HandleType.POSIX_FD | HandleType.FABRIC
        return HandleType(properties.requested_handle_types & known)

    def granularity(self, device: int) -> int:
        """The unit, in bytes, of physical allocations and mappings on `device`."""
        size = c_size_t()
        properties = allocation_properties(device, HandleType.POSIX_FD)
        self.call("cuMemGetAllocationGranularity", byref(size), byref(properties), GRANULARITY_MINIMUM, device=device)
        return size.value

    def address_reserve(self, nbytes: int, alignment: int = 0) -> int:
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), nbytes, alignment, 0, 0)
        return address.value

    def address_free(self, address: int, nbytes: int) -> None:
        self.call("cuMemAddressFree", address, nbytes)

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        self.call("cuMemMap", address, nbytes, 0, handle, 0)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self.call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, device: int) -> None:
        """Let `device` read and write the mapped range."""
        access = AccessDescriptor(Location(LOCATION_DEVICE, device), ACCESS_READ_WRITE)
        self.call("cuMemSetAccess", address, nbytes, byref(access), 1, device=device)


def allocation_properties(device: int, handle_types: HandleType) -> AllocationProperties:
    """The description of plain device memory that may be shared in those ways."""
    return AllocationProperties(
        type=ALLOCATION_PINNED,
        requested_handle_types=int(handle_types),
        location=Location(LOCATION_DEVICE, device),
    )
