"""Host memory that other processes can map: sealed memfd segments, and tensors in them.

A memfd has no name in any file system, so nothing is left behind when a process is killed; the seal against shrinking
is what lets another process map it without the risk that a truncation kills it with SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.errors import ShareError, UnsupportedMemoryError
from kvferry.ipc.table import LocalExport, process_table

# Python 3.10 has these numbers, but not on every build; they are Linux's own.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

HOST_DEVICE = -1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fstatfs.restype = ctypes.c_int
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileIdentity(NamedTuple):
    """Which file a descriptor is open on; unique among the files that exist at one time."""

    device: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> FileIdentity:
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino)

    @property
    def handle(self) -> bytes:
        """The name of the file in the process's table of mappings."""
        return b"memfd:" + struct.pack("<QQ", self.device, self.inode)


def map_shared(fd: int, nbytes: int) -> int:
    """Map the first `nbytes` of `fd` for reading and writing; the address. Undone by `unmap_shared`.

    Python's own `mmap` keeps a duplicate of the descriptor for as long as the mapping lives; this keeps none, so that
    the number of open descriptors does not grow with the number of mappings.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise ShareError(f"mmap of {nbytes} bytes of shared memory failed: {os.strerror(code)}")
    assert isinstance(address, int)
    return address


def unmap_shared(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes) != 0:
        code = ctypes.get_errno()
        raise ShareError(f"munmap of {nbytes} bytes at {address:#x} failed: {os.strerror(code)}")


def file_system_magic(fd: int) -> int:
    """The number of the kind of file system that `fd` lies in."""
    buffer = (ctypes.c_long * 32)()  # struct statfs: its first word is the type, its size is 120 bytes at most
    if _libc.fstatfs(fd, buffer) != 0:
        raise ShareError(f"fstatfs failed: {os.strerror(ctypes.get_errno())}")
    return int(buffer[0])


def tensor_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """A flat `uint8` tensor over mapped host memory; `owner` lives as long as any view of it."""
    array: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)


class Segment:
    """A piece of host memory in a sealed memfd, mapped here, zero at first.

    Its tensors keep it alive. `close` ends exporting, and closes the descriptor; the memory itself is unmapped when the
    segment and its last tensor are gone. Other processes that mapped it keep the memory.

    Parameters
    ----------
    nbytes
        Size, rounded up to whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one byte, got {nbytes}")
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._lock = threading.Lock()  # the descriptor's number is nobody else's between the look and the dup
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            self.address = map_shared(self.fd, self.nbytes)
        except (OSError, OverflowError) as error:
            os.close(self.fd)
            raise ShareError(f"cannot make a shared segment of {self.nbytes} bytes: {error}") from error
        except BaseException:
            os.close(self.fd)
            raise
        self.identity = FileIdentity.of(self.fd)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._unmap = weakref.finalize(self, unmap_shared, self.address, self.nbytes)
        for finalizer in (self._close_fd, self._unmap):
            finalizer.atexit = False  # the kernel does it; other exit handlers may still use the memory
        process_table().segments.add(self.address, self.nbytes, self)

    def tensor(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """A flat `uint8` tensor over [offset, offset + nbytes), by default all; it keeps the segment alive."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside a segment of {self.nbytes}")
        return tensor_at(self.address + offset, nbytes, self)

    def publish(self) -> None:
        """Let this process resolve the segment's descriptor to the local memory, while the segment lives."""
        if self.closed:
            raise ShareError("the segment is closed: its memory can no longer be exported")
        table, handle = process_table(), self.identity.handle
        if handle not in table.exports:
            table.add_export(handle, LocalExport(self.identity.inode, self.address, self.nbytes, HOST_DEVICE))
            weakref.finalize(self, table.exports.pop, handle, None).atexit = False

    @property
    def closed(self) -> bool:
        return not self._close_fd.alive

    def export_fd(self) -> int:
        """A new descriptor of the file, close-on-exec; the caller closes it."""
        with self._lock:
            if self.closed:
                raise ShareError("the segment is closed: its memory can no longer be exported")
            return os.dup(self.fd)

    def close(self) -> None:
        """Close the descriptor; idempotent. Tensors stay valid, new exports are refused."""
        with self._lock:
            self._close_fd()

    def __repr__(self) -> str:
        return f"<Segment {self.nbytes} bytes, {'closed' if self.closed else 'open'}>"


def find_segment(address: int, nbytes: int) -> Segment | None:
    """The local segment that holds all of [address, address + nbytes), or None."""
    found = process_table().segments.find(address, nbytes)
    return found if isinstance(found, Segment) else None


def local_segment(identity: FileIdentity) -> Segment | None:
    """The living segment of this process that is the file `identity`, if it was exported from here."""
    export = process_table().exports.get(identity.handle)
    segment = None if export is None else find_segment(export.address, export.nbytes)
    return segment if segment is not None and segment.identity == identity else None


def allocate_shared(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A zero-filled CPU tensor in a shared segment of its own, ready for `HostIPCWrapper`.

    Raises
    ------
    ValueError
        A size is negative.
    ShareError
        The memory cannot be had.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"sizes must not be negative, got {tuple(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return Segment(nbytes).tensor(0, nbytes).view(dtype).view(tuple(shape))


def rehome(tensors: Iterable[torch.Tensor]) -> None:
    """Move the memory of CPU tensors into shared segments, in place.

    The tensors stay the same objects with the same values, shapes and strides. All views of one storage move together
    into one segment; a storage with users that are not among `tensors` (nor their bases) is refused, since those would
    be left behind and silently stop seeing writes. What is in a segment already, or has no bytes, stays as it is.
    Nothing is moved unless everything can be. So is memory that is not torch's own (NumPy's, `share_memory_`'s), whose
    owner would be left behind, and a tensor that C++ code or DLPack holds. A storage object (`untyped_storage()`) kept
    from before stays with the old memory. Nobody else may write to the tensors meanwhile.

    Raises
    ------
    UnsupportedMemoryError
        A tensor is not dense CPU memory, or requires grad.
    ShareError
        A storage has other users, or the memory cannot be had.
    """
    groups = _by_storage(tensors)
    for members in groups.values():
        _check_no_other_users(members)
        _check_not_held(members)
    moves = [(members, _copy_to_segment(members[0].untyped_storage())) for members in groups.values()]
    for members, storage in moves:
        for tensor in members:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """The distinct tensors (and the tensors that they are views of) to move, by their storage."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for given in tensors:
        for tensor in (given, given._base):
            if tensor is None:
                continue
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise UnsupportedMemoryError(
                    f"only dense CPU tensors can be moved to shared memory, got {tensor.layout} on {tensor.device}"
                )
            if tensor.requires_grad:
                raise UnsupportedMemoryError(
                    f"a tensor of shape {tuple(tensor.shape)} requires grad; a KV cache does not: "
                    "call requires_grad_(False) first"
                )
            storage = tensor.untyped_storage()
            if storage.nbytes() > 0 and find_segment(storage.data_ptr(), storage.nbytes()) is None:
                groups.setdefault(storage._cdata, {})[id(tensor)] = tensor
    return {storage: list(members.values()) for storage, members in groups.items()}


def _check_no_other_users(members: list[torch.Tensor]) -> None:
    storage = members[0].untyped_storage()
    if not storage.resizable() or storage.is_shared():
        raise ShareError(
            f"the {storage.nbytes()} bytes under a tensor of shape {tuple(members[0].shape)} are not torch's own "
            "(NumPy, frombuffer, share_memory_): their owner would be left behind. Make the tensor by torch or by "
            "kvferry.ipc.allocate_shared"
        )
    # One use is `storage` itself. The count is torch's own, of the C++ object.
    others = torch._C._storage_Use_Count(storage._cdata) - 1 - len(members)
    if others > 0:
        raise ShareError(
            f"a storage of {storage.nbytes()} bytes has {others} users (other views, detached or NumPy aliases) beside "
            f"the {len(members)} tensors given: pass all of its views together, or drop the others first"
        )


def _check_not_held(members: list[torch.Tensor]) -> None:
    """Refuse a tensor that C++ or DLPack holds: it has the old address, which would be freed under it."""
    for tensor in members:
        views = sum(other._base is tensor for other in members)
        if hasattr(tensor, "_use_count") and tensor._use_count() > 1 + views:
            raise ShareError(
                f"a tensor of shape {tuple(tensor.shape)} is held outside Python, by DLPack (NumPy, CuPy) or C++ code, "
                "at its old address: drop that first"
            )


def _copy_to_segment(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    target = Segment(storage.nbytes()).tensor(0, storage.nbytes())
    source = torch.empty(0, dtype=torch.uint8).set_(storage)
    target.copy_(source)
    return target.untyped_storage()
