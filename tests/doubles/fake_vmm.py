"""The double's virtual memory: physical allocations are memfds, mapped into reserved address ranges."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

from doubles.fake_base import INVALID_VALUE, Refused, put
from doubles.fake_memory import NOT_FOUND, FakeMemory, new_memfd, open_handle, pack_handle

NOT_PERMITTED = 800
GRANULARITY = 2 << 20
_ANONYMOUS_NONE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass
class Physical:
    """Physical memory; it goes when no handle and no mapping holds it."""

    fd: int
    size: int
    device: int
    handle_types: int
    holds: int

    def drop(self) -> None:
        self.holds -= 1
        if self.holds == 0:
            os.close(self.fd)


@dataclass
class Chunk:
    """One physical allocation mapped at an address."""

    base: int
    physical: Physical
    number: int
    accessible: bool


class FakeVmm(FakeMemory):
    """cuMemCreate and its family."""

    def __init__(self, visible: Any, mig: bool) -> None:
        super().__init__(visible, mig)
        self.fabric_permitted = False
        self.handles: dict[int, Physical] = {}
        self.reservations: dict[int, int] = {}
        self.chunks: dict[int, Chunk] = {}

    def _chunk(self, address: int) -> Chunk | None:
        with self.lock:
            for chunk in self.chunks.values():
                if chunk.base <= address < chunk.base + chunk.physical.size:
                    return chunk
        return None

    def _handle(self, physical: Physical) -> int:
        number = 0x10000 + next(self.numbers)
        self.handles[number] = physical
        return number

    def _physical(self, handle: int) -> Physical:
        if handle not in self.handles:
            raise Refused(INVALID_VALUE)
        return self.handles[handle]

    def attributes(self, address: int) -> dict[int, int]:
        chunk = self._chunk(address)
        if chunk is None:
            return super().attributes(address)
        start = max(base for base in self.reservations if base <= address)
        physical = chunk.physical
        values = {2: 2, 7: chunk.number, 9: physical.device, 11: start, 12: self.reservations[start]}
        return {**values, 14: physical.handle_types}

    def do_cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        chunk = self._chunk(address)
        if chunk is None:
            super().do_cuMemGetAddressRange_v2(base, size, address)
            return
        self.device()
        put(base, chunk.base)
        put(size, chunk.physical.size)

    def do_cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> None:
        del option
        self._known(properties._obj.location.id)
        put(size, GRANULARITY)

    def do_cuMemCreate(self, handle: Any, nbytes: int, properties: Any, flags: int) -> None:
        asked = properties._obj
        if nbytes <= 0 or nbytes % GRANULARITY or flags or asked.type != 1 or asked.location.type != 1:
            raise Refused(INVALID_VALUE)
        if asked.requested_handle_types & 8 and not self.fabric_permitted:
            raise Refused(NOT_PERMITTED)
        device = self._known(asked.location.id)
        with self.lock:
            physical = Physical(new_memfd(nbytes), nbytes, device, asked.requested_handle_types, 1)
            put(handle, self._handle(physical))

    def do_cuMemRelease(self, handle: int) -> None:
        with self.lock:
            self._physical(handle).drop()
            del self.handles[handle]

    def do_cuMemRetainAllocationHandle(self, handle: Any, address: int) -> None:
        chunk = self._chunk(address)
        if chunk is None:
            raise Refused(INVALID_VALUE)
        with self.lock:
            chunk.physical.holds += 1
            put(handle, self._handle(chunk.physical))

    def do_cuMemGetAllocationPropertiesFromHandle(self, properties: Any, handle: int) -> None:
        physical = self._physical(handle)
        properties._obj.type = 1
        properties._obj.requested_handle_types = physical.handle_types
        properties._obj.location.type = 1
        properties._obj.location.id = physical.device

    def do_cuMemExportToShareableHandle(self, place: Any, handle: int, kind: int, flags: int) -> None:
        physical = self._physical(handle)
        if flags or not physical.handle_types & kind:
            raise Refused(INVALID_VALUE)
        if kind == 1:
            put(place, os.dup(physical.fd))
        else:
            place._obj.data[:] = pack_handle(b"fakefab", physical.fd, 0, physical.size)

    def do_cuMemImportFromShareableHandle(self, handle: Any, source: Any, kind: int) -> None:
        if kind == 1:
            try:
                if "memfd:fake-gpu" not in os.readlink(f"/proc/self/fd/{source}"):
                    raise Refused(INVALID_VALUE)
                fd = os.dup(source)
            except OSError:
                raise Refused(INVALID_VALUE) from None
        else:
            fd, _ = open_handle(b"fakefab", bytes(source._obj.data))
        with self.lock:
            put(handle, self._handle(Physical(fd, os.fstat(fd).st_size, 0, kind, 1)))

    def do_cuMemAddressReserve(self, place: Any, nbytes: int, alignment: int, address: int, flags: int) -> None:
        if nbytes <= 0 or nbytes % GRANULARITY or address or flags or alignment & (alignment - 1):
            raise Refused(INVALID_VALUE)
        start = _libc.mmap(None, nbytes, 0, _ANONYMOUS_NONE, -1, 0)
        if start in (None, _FAILED):
            raise Refused(2)
        self.reservations[start] = nbytes
        put(place, start)

    def do_cuMemAddressFree(self, address: int, nbytes: int) -> None:
        if self.reservations.get(address) != nbytes or any(address <= c < address + nbytes for c in self.chunks):
            raise Refused(INVALID_VALUE)
        del self.reservations[address]
        _libc.munmap(address, nbytes)

    def do_cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        physical = self._physical(handle)
        inside = any(a <= address and address + nbytes <= a + n for a, n in self.reservations.items())
        if not inside or nbytes != physical.size or offset or flags or self._chunk(address) is not None:
            raise Refused(INVALID_VALUE)
        with self.lock:
            if _libc.mmap(address, nbytes, 0, mmap.MAP_SHARED | _FIXED, physical.fd, 0) != address:
                raise Refused(2)
            physical.holds += 1
            self.chunks[address] = Chunk(address, physical, next(self.numbers), accessible=False)

    def do_cuMemUnmap(self, address: int, nbytes: int) -> None:
        with self.lock:
            covered = [c for c in self.chunks.values() if address <= c.base < address + nbytes]
            if sum(c.physical.size for c in covered) != nbytes:
                raise Refused(INVALID_VALUE)
            _libc.mmap(address, nbytes, 0, _ANONYMOUS_NONE | _FIXED, -1, 0)
            for chunk in covered:
                del self.chunks[chunk.base]
                chunk.physical.drop()

    def do_cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> None:
        if count != 1 or access._obj.flags != 3:
            raise Refused(INVALID_VALUE)
        self._known(access._obj.location.id)
        covered = [c for c in self.chunks.values() if address <= c.base < address + nbytes]
        if sum(c.physical.size for c in covered) != nbytes:
            raise Refused(NOT_FOUND)
        _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        for chunk in covered:
            chunk.accessible = True
