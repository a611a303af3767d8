"""CUDA memory shared by driver-level handles: any cudaMalloc allocation, whoever made it."""

from __future__ import annotations

from functools import partial

import torch

from kvferry.cuda.device import bound, device_uuid, enable_peer_access, ordinal_of, visible_uuids
from kvferry.cuda.functions import ALREADY_MAPPED, HANDLE_BYTES
from kvferry.cuda.memory import MemoryKind, PointerInfo
from kvferry.errors import CudaError, ShareError, StaleHandleError, UnsupportedMemoryError
from kvferry.ipc.descriptor import MAX_BYTES, common_fields
from kvferry.ipc.mapped import DenseDescriptor, MappedIPCWrapper, inspect
from kvferry.ipc.mapping_records import Opened
from kvferry.ipc.permute import dense_view
from kvferry.ipc.table import LocalExport, process_table


class RawCudaDescriptor(DenseDescriptor, frozen=True, kw_only=True, tag="raw"):
    """Bytes of the allocation of `alloc_size` bytes that the driver's IPC `handle` opens."""

    handle: bytes
    alloc_size: int

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES or not 0 < self.alloc_size < MAX_BYTES:
            raise ValueError(f"bad CUDA IPC handle of {len(self.handle)} bytes for {self.alloc_size} bytes")
        super().__post_init__()

    def total_bytes(self) -> int:
        return self.alloc_size

    def mapping_handle(self) -> bytes:
        return self.handle


class RawCudaIPCWrapper(MappedIPCWrapper):
    """A tensor in cudaMalloc memory: torch's caching allocator, or a raw pool such as `at::for_blob` wraps.

    The tensor's axes are put in memory order (metadata only) and it has to be contiguous then; it is never copied. The
    handle is that of the whole allocation, taken at its base, and the tensor's byte offset travels beside it. The
    importer maps each allocation once per process, however many tensors lie in it. Needs no shared `/dev/shm`. There
    is no fall-back to another kind of IPC: VMM, managed, pooled and host memory are refused by name.

    In the process that exported it, `to_tensor` aliases the allocation itself, which the driver would refuse to open;
    an allocation that was freed in between is refused. As in another process, the alias does not keep the exported
    tensor alive: the exporting wrapper does.

    While an importer has it mapped, the memory stays allocated even if the exporter dies; `close` the wrapper and drop
    its tensors to give it back.
    """

    descriptor_type = RawCudaDescriptor

    def _export(self, tensor: torch.Tensor) -> tuple[RawCudaDescriptor, torch.Tensor]:
        view = dense_view(tensor)
        info = inspect(view, MemoryKind.LEGACY, type(self).__name__)
        nbytes = view.numel() * view.element_size()
        offset = view.data_ptr() - info.base
        if offset + nbytes > info.size:
            raise UnsupportedMemoryError(
                f"the tensor's {nbytes} bytes go beyond its allocation of {info.size} bytes at {info.base:#x}"
            )
        handle = _handle_of(info)
        table = process_table()
        table.add_export(handle, LocalExport(info.buffer_id, info.base, info.size, info.device))
        common = common_fields(view, device_uuid=device_uuid(info.device), exporter=table.token)
        descriptor = RawCudaDescriptor(
            **common, handle=handle, alloc_size=info.size, buffer_id=info.buffer_id, offset=offset, nbytes=nbytes
        )
        return descriptor, view

    def to_tensor_for(self, reader: int) -> torch.Tensor:
        """As `to_tensor`, for kernels of the device with that number in this process, which need not be the memory's.

        That one need not be visible here. A GPU reaches another's memory over NVLink or PCIe where the handle was
        opened in its own context; enabling peer access between contexts does not let kernels reach what was opened in
        the other one. To torch the tensor is on `reader` then. In the exporting process it is the memory itself, on its
        own device, which `reader` is let reach.

        Raises ShareError; and CudaError where the two GPUs are not connected.
        """
        with self._lock:
            if self._closed:
                raise ShareError(f"{self!r} is closed: call to_tensor_for() before close()")
        tensor = self._open_for(reader)
        self._opened = True
        if self._descriptor.exporter == process_table().token and (home := ordinal_of(self.device_uuid)) != reader:
            enable_peer_access(reader, home)
        return tensor

    def _map(self, device: int) -> Opened:
        descriptor = self._described(RawCudaDescriptor)
        with bound(device) as drv:
            try:
                address = drv.ipc_open_mem_handle(descriptor.handle)
            except CudaError as error:
                raise ShareError(_why_not_opened(descriptor, error)) from error
            try:
                base, size = drv.address_range(address)
                mapped = base + size - address
                if mapped < descriptor.alloc_size:
                    raise StaleHandleError(
                        f"the handle opens {mapped} bytes, the exporter spoke of {descriptor.alloc_size}: it has freed "
                        "the allocation and made another"
                    )
            except BaseException:
                drv.ipc_close_mem_handle(address)
                raise
        return Opened(address, mapped, partial(_unmap, device, address))


def _handle_of(info: PointerInfo) -> bytes:
    with bound(info.device) as drv:
        try:
            return drv.ipc_get_mem_handle(info.base)
        except CudaError as error:
            raise UnsupportedMemoryError(
                f"the allocation of {info.size} bytes at {info.base:#x} on device {info.device} gives no IPC handle: "
                f"{error}. Memory that another process shared with this one cannot be shared on: use the original"
            ) from error


def _unmap(device: int, address: int) -> None:
    with bound(device) as drv:
        try:
            drv.context_synchronize()  # copies that still read the mapping
        finally:
            drv.ipc_close_mem_handle(address)


def _why_not_opened(descriptor: RawCudaDescriptor, error: CudaError) -> str:
    head = f"the raw handle of {descriptor.alloc_size} bytes on {descriptor.device_uuid} cannot be opened: {error}. "
    if error.code == ALREADY_MAPPED:
        return head + (
            "Other code in this process, such as torch's own IPC (CudaIPCWrapper), has the same allocation open, and "
            "this driver opens it once only: use one kind of wrapper for it"
        )
    return head + (
        "Either the exporter has ended or freed it; or the two processes do not share a pid namespace, which this kind "
        "of handle needs (containers: hostPID, or one pod); or they see the device differently (visible here: "
        f"{', '.join(visible_uuids())})"
    )
