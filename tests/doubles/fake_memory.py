"""The double's memory: every allocation is a memfd, so that another process can map it and it outlives its maker."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

from doubles.fake_base import INVALID_VALUE, FakeBase, Refused, put

OUT_OF_MEMORY = 2
ALREADY_MAPPED = 208
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
TOTAL_BYTES = 64 << 30
_HANDLE = struct.Struct("<8sIiQQQ")


@dataclass
class Allocation:
    """A range of addresses backed by a memfd; `fd` is -1 for memory that is not ours to export."""

    base: int
    size: int
    device: int
    buffer_id: int
    kind: str  # legacy, managed, pool, imported, registered
    fd: int
    mapping: mmap.mmap | None

    def close(self) -> None:
        if self.mapping is not None:
            self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)


def new_memfd(nbytes: int) -> int:
    fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def map_fd(fd: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map a memfd; returns the mapping and its address."""
    mapping = mmap.mmap(fd, nbytes)
    probe = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(probe)
    del probe
    return mapping, address


def pack_handle(kind: bytes, fd: int, number: int, size: int) -> bytes:
    """64 bytes by which another process finds our file `fd`."""
    return _HANDLE.pack(kind, os.getpid(), fd, number, size, os.fstat(fd).st_ino).ljust(64, b"\0")


def open_handle(kind: bytes, packed: bytes) -> tuple[int, int]:
    """The file that a handle of another process names, opened here, and its size."""
    found, pid, fd, _, size, inode = _HANDLE.unpack_from(packed)
    if found.rstrip(b"\0") != kind:
        raise Refused(INVALID_VALUE)
    if pid == os.getpid():
        raise Refused(INVALID_CONTEXT)
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise Refused(INVALID_HANDLE) from None
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise Refused(INVALID_HANDLE)
    return opened, size


class FakeMemory(FakeBase):
    """cuMemAlloc and what is asked of pointers, legacy IPC, registered host memory."""

    def __init__(self, visible: Any, mig: bool) -> None:
        super().__init__(visible, mig)
        self.allocations: dict[int, Allocation] = {}
        self.numbers = itertools.count(1)
        self.reopen_counted = False  # newer drivers count a second open of the same handle, older ones refuse it
        self._opened: dict[tuple[bytes, int], list[int]] = {}  # by handle, and the device whose context opened it

    def allocate(self, nbytes: int, kind: str) -> int:
        """A new allocation of that kind on the current device; also used by tests for kinds without a call here."""
        device = self.device()
        with self.lock:
            if nbytes <= 0 or nbytes > self.free_bytes():
                raise Refused(OUT_OF_MEMORY)
            size = -(-nbytes // 512) * 512
            fd = new_memfd(size)
            mapping, address = map_fd(fd, size)
            self.allocations[address] = Allocation(address, size, device, next(self.numbers), kind, fd, mapping)
            return address

    def free_bytes(self) -> int:
        return TOTAL_BYTES - sum(a.size for a in self.allocations.values() if a.kind != "registered")

    def find(self, address: int) -> Allocation | None:
        with self.lock:
            for allocation in self.allocations.values():
                if allocation.base <= address < allocation.base + allocation.size:
                    return allocation
        return None

    def kernel_reaches(self, device: int, address: int) -> bool:
        """Imported memory is reached from the device whose context opened it, whatever access peers were given."""
        found = self.find(address)
        if found is None or found.device == device or found.kind not in ("legacy", "imported"):
            return True
        return found.kind == "legacy" and (device, found.device) in self.peers

    def do_cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        self.device()
        put(free, self.free_bytes())
        put(total, TOTAL_BYTES)

    def do_cuMemAlloc_v2(self, address: Any, nbytes: int) -> None:
        put(address, self.allocate(nbytes, "legacy"))

    def do_cuMemAllocManaged(self, address: Any, nbytes: int, flags: int) -> None:
        del flags
        put(address, self.allocate(nbytes, "managed"))

    def do_cuMemFree_v2(self, address: int) -> None:
        self.device()
        with self.lock:
            allocation = self.allocations.get(address)
            if allocation is None or allocation.kind in ("imported", "registered"):
                raise Refused(INVALID_VALUE)
            del self.allocations[address]
        allocation.close()

    def do_cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        self.device()
        allocation = self.find(address)
        if allocation is None:
            raise Refused(NOT_FOUND)
        put(base, allocation.base)
        put(size, allocation.size)

    def attributes(self, address: int) -> dict[int, int]:
        """Attribute -> value; nothing for memory that CUDA does not know."""
        found = self.find(address)
        if found is None:
            return {}
        return {
            2: 1 if found.kind == "registered" else 2,
            7: found.buffer_id,
            8: int(found.kind == "managed"),
            9: found.device,
            10: int(found.kind in ("legacy", "imported")),
            11: found.base,
            12: found.size,
            17: 0x77 if found.kind == "pool" else 0,
        }

    def do_cuPointerGetAttributes(self, count: int, names: Any, places: Any, address: int) -> None:
        self.device()
        values = self.attributes(address)
        for i in range(count):
            ctypes.c_uint64.from_address(places[i]).value = values.get(names[i], 0)

    def do_cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> None:
        del flags
        with self.lock:
            if address in self.allocations:
                raise Refused(ALREADY_REGISTERED)
            self.allocations[address] = Allocation(
                address, nbytes, self.device(), next(self.numbers), "registered", -1, None
            )

    def do_cuMemHostUnregister(self, address: int) -> None:
        self.device()
        with self.lock:
            if address not in self.allocations or self.allocations[address].kind != "registered":
                raise Refused(NOT_REGISTERED)
            del self.allocations[address]

    def do_cuMemHostGetDevicePointer_v2(self, pointer: Any, address: int, flags: int) -> None:
        del flags
        self.device()
        found = self.find(address)
        if found is None or found.kind != "registered":
            raise Refused(INVALID_VALUE)
        put(pointer, address)

    def do_cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        self.device()
        with self.lock:
            allocation = self.allocations.get(address)  # the base only
            if allocation is None or allocation.kind != "legacy":
                raise Refused(INVALID_VALUE)
            packed = pack_handle(b"fakemem", allocation.fd, allocation.buffer_id, allocation.size)
        handle._obj.data[:] = packed

    def do_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        if flags != 1:
            raise Refused(INVALID_VALUE)
        device = self.device()
        packed = bytes(handle.data)
        with self.lock:
            opened = self._opened.get((packed, device))
            if opened is not None:
                if not self.reopen_counted:
                    raise Refused(ALREADY_MAPPED)
                opened[1] += 1
                put(address, opened[0])
                return
            fd, size = open_handle(b"fakemem", packed)
            mapping, base = map_fd(fd, size)
            os.close(fd)
            self.allocations[base] = Allocation(base, size, device, next(self.numbers), "imported", -1, mapping)
            self._opened[packed, device] = [base, 1]
            put(address, base)

    def do_cuIpcCloseMemHandle(self, address: int) -> None:
        self.device()
        with self.lock:
            key = next((key for key, opened in self._opened.items() if opened[0] == address), None)
            if key is None:
                raise Refused(INVALID_VALUE)
            self._opened[key][1] -= 1
            if self._opened[key][1]:
                return
            del self._opened[key]
            allocation = self.allocations.pop(address)
        allocation.close()

    @property
    def open_mappings(self) -> int:
        return len(self._opened)
