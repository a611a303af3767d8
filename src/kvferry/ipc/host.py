"""Host tensors in memfd memory, opened in another process by mapping the file descriptor that travels with them."""

from __future__ import annotations

import fcntl
import os
import stat
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvferry.errors import MappingBoundsError, ShareError, UnsupportedMemoryError
from kvferry.ipc.descriptor import MAX_BYTES, WrapperDescriptor, check_dense_run, common_fields
from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingRef
from kvferry.ipc.permute import dense_view
from kvferry.ipc.shared_memory import (
    F_GET_SEALS,
    F_SEAL_SHRINK,
    FileIdentity,
    Segment,
    file_system_magic,
    find_segment,
    local_segment,
    map_shared,
    tensor_at,
    unmap_shared,
)
from kvferry.ipc.table import process_table
from kvferry.ipc.wrapper import DeviceIPCWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

_TMPFS_MAGIC = 0x01021994
# The most that one pread or pwrite moves, so that no single call holds a thread for long.
_PIECE_BYTES = 8 << 20


class HostDescriptor(WrapperDescriptor, frozen=True, kw_only=True, tag="host"):
    """A dense run of `nbytes` bytes at byte `offset` of a memfd, which is known by its size, device and inode."""

    file_size: int
    offset: int
    nbytes: int
    file_device: int
    inode: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_uuid:
            raise ValueError(f"host memory has no device UUID, got {self.device_uuid!r}")
        check_dense_run(self, self.offset, self.nbytes, total_bytes=self.file_size)
        if self.file_size >= MAX_BYTES or min(self.file_device, self.inode) < 0:
            raise ValueError(f"a file of {self.file_size} bytes, device {self.file_device}, inode {self.inode}")


class HostIPCWrapper(DeviceIPCWrapper):
    """A CPU tensor that lies in a shared segment (`allocate_shared`, `rehome`); one file descriptor travels with it.

    The importer checks the file before it touches it: a memfd (or another file in memory), the very file and size that
    the descriptor names, sealed against shrinking. Then it maps the file once per process, however many tensors lie in
    it. A file without that seal is never mapped, since a truncation would kill this process with SIGBUS; its bytes are
    reached by `read_into` and `write_from`. In the process that made the segment, the tensor aliases the original.
    """

    descriptor_type = HostDescriptor

    def _begin(self) -> None:
        super()._begin()
        self._memory: MappingRef | Segment | None = None  # importer: what keeps the memory mapped
        self._file = -1  # importer: an unsealed file

    def _export(self, tensor: torch.Tensor) -> tuple[HostDescriptor, torch.Tensor]:
        if tensor.device.type != "cpu":
            raise UnsupportedMemoryError(f"{type(self).__name__} shares CPU tensors, got one on {tensor.device}")
        view = dense_view(tensor)
        nbytes = view.numel() * view.element_size()
        segment = find_segment(view.data_ptr(), nbytes)
        if segment is None:
            raise UnsupportedMemoryError(
                f"the CPU tensor of shape {tuple(tensor.shape)} lies in ordinary memory, which no other process can "
                "map: make it by kvferry.ipc.allocate_shared, or move it by kvferry.ipc.rehome"
            )
        segment.publish()
        descriptor = HostDescriptor(
            **common_fields(view, device_uuid="", exporter=process_table().token),
            file_size=segment.nbytes,
            offset=view.data_ptr() - segment.address,
            nbytes=nbytes,
            file_device=segment.identity.device,
            inode=segment.identity.inode,
        )
        return descriptor, view

    @property
    def _host(self) -> HostDescriptor:
        return self._described(HostDescriptor)

    @property
    def num_fds(self) -> int:
        return 1

    def export_fd(self, index: int) -> int:
        """A new descriptor of the segment's file, close-on-exec; the caller closes it."""
        tensor = self._tensor
        if index != 0:
            raise IndexError(f"{self!r} has no file descriptor {index} to give")
        if tensor is None:
            raise ShareError(f"{self!r} has no file descriptor to give: only the exporter has, until close()")
        segment = find_segment(tensor.data_ptr(), self._host.nbytes)
        if segment is None:
            raise ShareError(f"the segment behind {self!r} is closed: its memory can no longer be exported")
        return segment.export_fd()

    def _accept_fd(self, index: int, fd: int) -> None:
        if self._memory is not None or self._file >= 0:
            raise ShareError(f"{self!r} has its file descriptor already")
        memory: MappingRef | Segment | None = None
        file = -1
        if _check_file(fd, self._host):
            memory = local_segment(FileIdentity.of(fd)) if self._is_local else None
            memory = memory or _map(fd, self._host)
        else:
            file = os.dup(fd)
        with self._lock:
            if not self._closed and self._memory is None and self._file < 0:
                self._memory, self._file = memory, file
                return
        if file >= 0:
            os.close(file)
        raise ShareError(f"{self!r} was closed, or had another file descriptor, while this one came in")

    @property
    def _is_local(self) -> bool:
        return self._descriptor.exporter == process_table().token

    def _open(self) -> torch.Tensor:
        host, memory = self._host, self._memory
        if memory is None:
            why = "its file is not sealed against shrinking: use read_into and write_from"
            raise ShareError(f"{self!r}: {why if self._file >= 0 else 'its file descriptor has not come'}")
        if isinstance(memory, Segment):
            flat = memory.tensor(host.offset, host.nbytes)
        else:
            owner = memory.share()
            flat = tensor_at(owner.address + host.offset, host.nbytes, owner)
        return flat.view(host.torch_dtype).reshape(host.shape)

    def read_into(self, buffer: Buffer, offset: int = 0) -> None:
        """Fill `buffer` from the tensor's bytes at `offset`; for a file that is not sealed, by bounded preads.

        Raises
        ------
        MappingBoundsError
            The bytes asked for are not inside the tensor.
        ShareError
            The wrapper holds no unsealed file, or the file has become too short.
        """
        view = memoryview(buffer).cast("B")
        self._transfer(view, offset, lambda fd, piece, at: os.preadv(fd, [piece], at))

    def write_from(self, buffer: Buffer, offset: int = 0) -> None:
        """Write `buffer` over the tensor's bytes at `offset`; the twin of `read_into`, and raises the same."""
        view = memoryview(buffer).cast("B")
        self._transfer(view, offset, lambda fd, piece, at: os.pwritev(fd, [piece], at))

    def _transfer(self, view: memoryview, offset: int, move: Callable[[int, memoryview, int], int]) -> None:
        host = self._host
        with self._lock:
            if self._file < 0:
                raise ShareError(f"{self!r} holds no unsealed file: use to_tensor()")
            # One of this call's own: after close() the number could soon be that of any other file.
            file = os.dup(self._file)
        try:
            if offset < 0 or offset + len(view) > host.nbytes:
                raise MappingBoundsError(
                    f"bytes {offset} to {offset + len(view)} are outside a tensor of {host.nbytes}"
                )
            done = 0
            while done < len(view):
                moved = move(file, view[done : done + _PIECE_BYTES], host.offset + offset + done)
                if moved <= 0:
                    raise ShareError(f"the file behind {self!r} ends at byte {host.offset + offset + done}: it was cut")
                done += moved
        except OSError as error:
            raise ShareError(f"the file behind {self!r} cannot be read or written: {error}") from error
        finally:
            os.close(file)

    def _release(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
            file, self._file = self._file, -1
        if isinstance(memory, MappingRef):
            memory.release()
        if file >= 0:
            os.close(file)


def _check_file(fd: int, host: HostDescriptor) -> bool:
    """Whether `fd` may be mapped (True) or only read and written (False).

    Raises
    ------
    ShareError
        It is not a file in memory, or not the file that the descriptor names.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ShareError(f"the file descriptor that came is not a memory file (mode {status.st_mode:o})")
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise ShareError("the file descriptor that came is an ordinary file, not a memfd") from error
    # Huge pages can run out after mmap, which is SIGBUS again; a file on FUSE could block a read for ever.
    if file_system_magic(fd) != _TMPFS_MAGIC:
        raise ShareError("the file descriptor that came is not in plain memory (huge pages?), so it is not safe to map")
    if (status.st_dev, status.st_ino) != (host.file_device, host.inode) or status.st_size < host.file_size:
        raise ShareError(
            f"the file descriptor that came is another file than the descriptor says: {status.st_size} bytes, "
            f"inode {status.st_ino}; wanted {host.file_size} bytes, inode {host.inode}"
        )
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_APPEND:
        # Where the file is mapped here already, mmap would not ask whether this peer may write to it.
        raise ShareError("the file descriptor that came is not open for reading and writing in place")
    return bool(seals & F_SEAL_SHRINK)


def _map(fd: int, host: HostDescriptor) -> MappingRef:
    """A use of the process's one mapping of the file behind `fd`."""
    identity, size = FileIdentity.of(fd), os.fstat(fd).st_size

    def opener() -> Opened:
        address = map_shared(fd, size)
        return Opened(address, size, partial(unmap_shared, address, size))

    # The inode names the allocation: whoever exports it, it is the same memory, and is mapped once.
    ref = process_table().mappings.acquire(MappingKey(b"", identity.inode, identity.handle), opener)
    if host.offset + host.nbytes > ref.nbytes:
        ref.release()
        raise MappingBoundsError(
            f"bytes {host.offset} to {host.offset + host.nbytes} lie beyond the {ref.nbytes} bytes that are mapped"
        )
    return ref
