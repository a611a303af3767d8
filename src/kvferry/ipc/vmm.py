"""CUDA virtual memory shared chunk by chunk: cuMemCreate allocators, torch's expandable segments."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import msgspec
import torch

from kvferry.cuda.device import bound, device_uuid, ordinal_of
from kvferry.cuda.driver import Driver
from kvferry.cuda.functions import HANDLE_BYTES, PointerAttribute
from kvferry.cuda.memory import HandleType, MemoryKind
from kvferry.errors import CudaError, MappingBoundsError, ShareError, UnsupportedMemoryError
from kvferry.ipc.descriptor import MAX_BYTES, TOKEN_BYTES, common_fields
from kvferry.ipc.mapped import DenseDescriptor, MappedIPCWrapper, inspect
from kvferry.ipc.mapping_records import Opened
from kvferry.ipc.permute import dense_view
from kvferry.ipc.table import LocalExport, new_token, process_table

_LOG = logging.getLogger(__name__)

_MAX_CHUNKS = 65_536


class VmmCudaDescriptor(DenseDescriptor, frozen=True, kw_only=True, tag="vmm"):
    """Bytes of physical chunks that get mapped side by side, in order.

    `chunks` are their sizes in bytes. `fabric` is empty when each chunk travels as a file descriptor, else it holds
    the chunks' fabric handles. `export_id` is random: no two exports have the same, so no mapping is ever stale.
    """

    export_id: bytes
    chunks: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_CHUNKS)]
    fabric: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=_MAX_CHUNKS)]

    def __post_init__(self) -> None:
        if len(self.export_id) != TOKEN_BYTES:
            raise ValueError(f"an export id has {TOKEN_BYTES} bytes, got {len(self.export_id)}")
        if not 0 < len(self.chunks) <= _MAX_CHUNKS or min(self.chunks) <= 0 or sum(self.chunks) >= MAX_BYTES:
            raise ValueError(f"{len(self.chunks)} chunks: wanted 1 to {_MAX_CHUNKS}, each of some bytes")
        if self.fabric and (len(self.fabric) != len(self.chunks) or {len(f) for f in self.fabric} != {HANDLE_BYTES}):
            raise ValueError(f"fabric handles: wanted {len(self.chunks)} of {HANDLE_BYTES} bytes")
        super().__post_init__()

    def total_bytes(self) -> int:
        return sum(self.chunks)

    def mapping_handle(self) -> bytes:
        return self.export_id


class VmmCudaIPCWrapper(MappedIPCWrapper):
    """A tensor in CUDA virtual memory, however many physical chunks it spans.

    Every chunk travels as the kind of handle that its allocator asked for: a POSIX file descriptor (sent over a Unix
    socket beside the descriptor), or a fabric handle. The importer reserves an address range of exactly the chunks'
    size, maps them side by side, and lets go of the handles at once. If any step fails, all earlier ones are undone.

    Memory that was made with no exportable handle type is refused, and so is any other kind of memory. In the process
    that exported it, `to_tensor` aliases the memory itself.
    """

    descriptor_type = VmmCudaDescriptor

    def _begin(self) -> None:
        super()._begin()
        self._bases: tuple[int, ...] = ()  # exporter: where the chunks lie
        self._handles: dict[int, int] = {}  # importer: chunk -> allocation, until they are mapped

    def _export(self, tensor: torch.Tensor) -> tuple[VmmCudaDescriptor, torch.Tensor]:
        view = dense_view(tensor)
        info = inspect(view, MemoryKind.VMM, type(self).__name__)
        nbytes = view.numel() * view.element_size()
        with bound(info.device) as drv:
            chunks = _chunks(drv, view.data_ptr(), nbytes)
            fabric = _fabric_handles(drv, chunks)
            parts = tuple((base, drv.pointer_attributes(base, (PointerAttribute.BUFFER_ID,))[0]) for base, _ in chunks)
        self._bases = tuple(base for base, _ in chunks)
        table = process_table()
        descriptor = VmmCudaDescriptor(
            **common_fields(view, device_uuid=device_uuid(info.device), exporter=table.token),
            export_id=new_token(),
            buffer_id=info.buffer_id,
            chunks=tuple(size for _, size in chunks),
            fabric=fabric,
            offset=view.data_ptr() - info.base,
            nbytes=nbytes,
        )
        export = LocalExport(info.buffer_id, info.base, descriptor.total_bytes(), info.device, parts)
        table.add_export(descriptor.export_id, export)
        return descriptor, view

    @property
    def num_fds(self) -> int:
        descriptor = self._described(VmmCudaDescriptor)
        return 0 if descriptor.fabric else len(descriptor.chunks)

    def export_fd(self, index: int) -> int:
        if not 0 <= index < min(self.num_fds, len(self._bases)):
            return super().export_fd(index)
        if self.closed:
            raise ShareError(f"{self!r} is closed: export its file descriptors before close()")
        with bound(ordinal_of(self.device_uuid)) as drv, _retained(drv, self._bases[index]) as handle:
            return drv.export_posix_fd(handle)

    def _accept_fd(self, index: int, fd: int) -> None:
        if self.descriptor.exporter == process_table().token:
            return  # to_tensor will alias the memory
        with bound(ordinal_of(self.device_uuid)) as drv:
            try:
                handle = drv.import_posix_fd(fd)
            except CudaError as error:
                raise ShareError(
                    f"chunk {index} of {self!r} cannot be imported from its file descriptor: {error}. Either the CUDA "
                    "driver did not export it, or this process may not use the device"
                ) from error
            with self._lock:
                spare = handle if self._closed else self._handles.pop(index, None)
                if not self._closed:
                    self._handles[index] = handle
            if spare is not None:
                drv.mem_release(spare)

    def _open(self) -> torch.Tensor:
        tensor = super()._open()
        self._drop_handles()  # left over where another wrapper had mapped the same export before
        return tensor

    def _map(self, device: int) -> Opened:
        descriptor = self._described(VmmCudaDescriptor)
        unit = _granularity(device)
        if any(size % unit for size in descriptor.chunks):
            raise MappingBoundsError(f"chunks of {descriptor.chunks[:8]} bytes are no multiples of {unit} bytes")
        # The handles go at the end of the block, whatever happens: what is mapped lives on by its mapping.
        with bound(device) as drv, contextlib.ExitStack() as spent:
            if descriptor.fabric:
                handles = [self._import_fabric(drv, place, spent) for place in range(len(descriptor.fabric))]
            else:
                handles = self._take_handles(len(descriptor.chunks))
                for handle in handles:
                    spent.callback(drv.mem_release, handle)
            base, mapped = _map_chunks(drv, device, list(zip(handles, descriptor.chunks, strict=True)))
        return Opened(base, descriptor.total_bytes(), partial(_unmap, device, mapped))

    def _take_handles(self, wanted: int) -> list[int]:
        """All imported allocations in order; from now on the caller's to release."""
        with self._lock:
            missing = [index for index in range(wanted) if index not in self._handles]
            if not missing:
                taken, self._handles = self._handles, {}
                return [taken[index] for index in range(wanted)]
        raise ShareError(
            f"{len(missing)} of the {wanted} file descriptors of {self!r} have not come, the first of them number "
            f"{missing[0]}: pass them to import_fd, or to decode the fds that encode gave"
        )

    def _import_fabric(self, drv: Driver, index: int, spent: contextlib.ExitStack) -> int:
        try:
            handle = drv.import_fabric(self._described(VmmCudaDescriptor).fabric[index])
        except CudaError as error:
            raise ShareError(
                f"fabric handle {index} of {self!r} cannot be imported: {error}. Both processes need an IMEX channel "
                "(/dev/nvidia-caps-imex-channels)"
            ) from error
        spent.callback(drv.mem_release, handle)
        return handle

    def _drop_handles(self) -> None:
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
        if handles:
            with bound(ordinal_of(self.device_uuid)) as drv:
                for handle in handles:
                    drv.mem_release(handle)

    def _release(self) -> None:
        super()._release()
        try:
            self._drop_handles()
        except CudaError:  # close() goes on; in a forked child the handles are the parent's anyway
            _LOG.warning("could not release the imported chunks of %r", self, exc_info=True)


def _granularity(device: int) -> int:
    with bound(device) as drv:
        return drv.granularity(device)


def _chunks(drv: Driver, address: int, nbytes: int) -> list[tuple[int, int]]:
    """Base and size of each physical chunk under [address, address + nbytes), in order."""
    chunks: list[tuple[int, int]] = []
    end = address + nbytes
    while address < end:
        base, size = drv.address_range(address)
        chunks.append((base, size))
        address = base + size
    return chunks


@contextlib.contextmanager
def _retained(drv: Driver, address: int) -> Iterator[int]:
    """The allocation mapped at `address`, held inside the block."""
    handle = drv.retain_allocation_handle(address)
    try:
        yield handle
    finally:
        drv.mem_release(handle)


def _fabric_handles(drv: Driver, chunks: Sequence[tuple[int, int]]) -> tuple[bytes, ...]:
    """The chunks' fabric handles; none where all of them can travel as file descriptors.

    Raises:
        UnsupportedMemoryError: they can travel in neither way.
    """
    types = HandleType.POSIX_FD | HandleType.FABRIC
    for base, size in chunks:
        with _retained(drv, base) as handle:
            types &= drv.handle_types_of(handle)
        if not types:
            raise UnsupportedMemoryError(
                f"the chunk of {size} bytes at {base:#x} cannot be exported: its allocator asked for no type of handle "
                "that another process could open. Let it set requestedHandleTypes of cuMemCreate to POSIX file "
                "descriptors, or to fabric handles, for all chunks"
            )
    if types & HandleType.POSIX_FD:
        return ()
    fabric = []
    for base, _ in chunks:
        with _retained(drv, base) as handle:
            fabric.append(drv.export_fabric(handle))
    return tuple(fabric)


def _map_chunks(drv: Driver, device: int, chunks: Sequence[tuple[int, int]]) -> tuple[int, contextlib.ExitStack]:
    """Map (allocation, bytes) side by side for `device`; returns the base, and what undoes it all."""
    total = sum(size for _, size in chunks)
    with contextlib.ExitStack() as undo:
        base = drv.address_reserve(total)
        undo.callback(drv.address_free, base, total)
        address = base
        for handle, size in chunks:
            drv.mem_map(address, size, handle)
            undo.callback(drv.mem_unmap, address, size)
            address += size
        drv.set_access(base, total, device)
        return base, undo.pop_all()


def _unmap(device: int, mapped: contextlib.ExitStack) -> None:
    with bound(device) as drv:
        try:
            drv.context_synchronize()  # copies that still read the mapping
        finally:
            mapped.close()
