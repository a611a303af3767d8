"""CUDA tensors of torch's caching allocator, shared by torch's own storage IPC."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import torch

from kvferry.cuda.device import bound, device_uuid
from kvferry.cuda.functions import HANDLE_BYTES
from kvferry.cuda.memory import MemoryKind, pointer_info
from kvferry.cuda.stream import Event
from kvferry.errors import DeadlineError, MappingBoundsError, ShareError, UnsupportedMemoryError
from kvferry.ipc.descriptor import MAX_BYTES, common_fields
from kvferry.ipc.mapped import MappedDescriptor, MappedIPCWrapper, inspect
from kvferry.ipc.mapping_records import Opened
from kvferry.ipc.table import LocalExport, process_table

# torch puts a version byte and a kind byte before the driver's handle; "c" is cudaMalloc memory. The other kind makes
# the importer take file descriptors out of the exporter's process, and is not let through.
_CUDA_MALLOC = b"c"
_COUNTER_FILE = re.compile(rb"/torch_[A-Za-z0-9_-]{1,200}")
# The file has so many counters (torch's CUDA_IPC_REF_COUNTER_FILE_SIZE). Torch counts down without looking: a larger
# offset would write beyond its mapping.
_MAX_COUNTERS = 10_000
_EVENT_TIMEOUT_S = 10.0
_POLL_S = 0.001


class TorchStorageDescriptor(MappedDescriptor, frozen=True, kw_only=True, tag="torch"):
    """What torch needs to open a storage, as plain fields: nothing is pickled.

    The storage is `storage_bytes` bytes at byte `storage_start` of the allocation behind `handle`; shape, stride and
    storage offset are the tensor's within the storage.
    """

    handle: bytes
    storage_bytes: int
    storage_start: int
    counter_file: bytes
    counter_offset: int
    event_handle: bytes
    event_sync: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        bare = len(self.handle) == HANDLE_BYTES
        if not bare and (len(self.handle) != HANDLE_BYTES + 2 or self.handle[1:2] != _CUDA_MALLOC):
            raise ValueError(f"not torch's handle of cudaMalloc memory: {len(self.handle)} bytes")
        if _COUNTER_FILE.fullmatch(self.counter_file) is None or not 0 <= self.counter_offset < _MAX_COUNTERS:
            raise ValueError(f"not torch's counter file: {self.counter_file[:64]!r} at {self.counter_offset}")
        if len(self.event_handle) not in (0, HANDLE_BYTES) or (self.event_sync and not self.event_handle):
            raise ValueError(f"bad event handle of {len(self.event_handle)} bytes")
        if self.storage_bytes <= 0 or not 0 <= self.storage_start < MAX_BYTES or self.num_elements == 0:
            raise ValueError(f"no bytes, or a bad place: {self.storage_bytes} at byte {self.storage_start}")
        if not (self.storage_offset + self.extent) * self.itemsize <= self.storage_bytes < MAX_BYTES:
            raise ValueError(f"shape {self.shape}, stride {self.stride} leaves a storage of {self.storage_bytes} bytes")

    def mapping_handle(self) -> bytes:
        # With torch's counter, which is one for each export: torch expects each export to be opened once.
        return b"%s%s#%d" % (self.handle, self.counter_file, self.counter_offset)

    def span(self) -> tuple[int, int]:
        return self.storage_start, self.storage_bytes

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        whole = flat[: self.storage_bytes // self.itemsize * self.itemsize].view(self.torch_dtype)
        return whole.as_strided(self.shape, self.stride, self.storage_offset)


class CudaIPCWrapper(MappedIPCWrapper):
    """A tensor of torch's caching allocator, any strides, opened through torch's own table of shared storages.

    For memory that torch did not allocate use RawCudaIPCWrapper; there is no fall-back. The two processes have to
    share `/dev/shm`: torch counts the uses of a storage in a file there, `/dev/shm/torch_<pid>_<n>_<n>`. When the
    exporter is killed with SIGKILL torch does not remove that file, and nobody else does (RawCudaIPCWrapper leaves
    nothing behind). An exporter's torch also keeps a storage that was sent and never opened until it ends, and loses
    count of one that several processes open: send each export to one process.

    Several tensors of one allocation, and the same allocation by RawCudaIPCWrapper too, are given right in one process
    where the driver counts opens (CUDA 12 and later); an older one refuses the second kind, and the error says so.

    In the exporting process `to_tensor` aliases the allocation, as RawCudaIPCWrapper does.
    """

    descriptor_type = TorchStorageDescriptor

    def _export(self, tensor: torch.Tensor) -> tuple[TorchStorageDescriptor, torch.Tensor]:
        info = inspect(tensor, MemoryKind.LEGACY, type(self).__name__)
        with bound(info.device):
            shared = _share(tensor)
        _, handle, storage_bytes, start, counter_file, counter_offset, event, event_sync = shared
        table = process_table()
        descriptor = TorchStorageDescriptor(
            **common_fields(tensor, device_uuid=device_uuid(info.device), exporter=table.token),
            handle=bytes(handle),
            buffer_id=info.buffer_id,
            storage_bytes=storage_bytes,
            storage_start=start,
            counter_file=bytes(counter_file),
            counter_offset=counter_offset,
            event_handle=bytes(event or b""),
            event_sync=bool(event_sync),
        )
        export = LocalExport(info.buffer_id, info.base, info.size, info.device)
        table.add_export(descriptor.mapping_handle(), export)
        return descriptor, tensor

    def _map(self, device: int) -> Opened:
        descriptor = self._described(TorchStorageDescriptor)
        storage = _open_storage(descriptor, device)
        start = storage.data_ptr() - descriptor.storage_start
        # Torch unmaps when the last storage over the allocation goes; this one goes when the table closes the mapping.
        return Opened(start, sum(descriptor.span()), partial(_drop, device, [storage]))


def _share(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UnsupportedMemoryError(
            f"torch cannot share the storage of the tensor of shape {tuple(tensor.shape)}: {error}. Its caching "
            "allocator did not allocate it: use RawCudaIPCWrapper"
        ) from error
    return shared


def _drop(device: int, storages: list[torch.UntypedStorage]) -> None:
    with bound(device) as drv:
        try:
            drv.context_synchronize()  # copies that still read the mapping
        finally:
            storages.clear()


def _wait_until_written(descriptor: TorchStorageDescriptor, device: int) -> None:
    """Poll the exporter's event here; torch would make our stream wait for it, for ever if the exporter dies."""
    deadline = time.monotonic() + _EVENT_TIMEOUT_S
    with Event.from_ipc_handle(descriptor.event_handle, device) as event:
        while not event.query():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"what its exporter was writing to the storage of {descriptor.storage_bytes} bytes was not done "
                    f"after {_EVENT_TIMEOUT_S} s: the exporter hangs or has ended"
                )
            time.sleep(_POLL_S)


def _open_storage(descriptor: TorchStorageDescriptor, device: int) -> torch.UntypedStorage:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if descriptor.event_sync:
        _wait_until_written(descriptor, device)
    try:
        with bound(device):
            storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
                device,
                descriptor.handle,
                descriptor.storage_bytes,
                descriptor.storage_start,
                descriptor.counter_file,
                descriptor.counter_offset,
                descriptor.event_handle,
                False,  # the event has been waited for
            )
    except RuntimeError as error:
        raise ShareError(
            f"torch cannot open the storage of {descriptor.storage_bytes} bytes on {descriptor.device_uuid}: {error}. "
            "Either its exporter has ended; or the processes do not share /dev/shm and a pid namespace; or "
            "RawCudaIPCWrapper has the same allocation open and this driver opens it once only: use one kind for it"
        ) from error
    start = storage.data_ptr() - descriptor.storage_start
    info = pointer_info(start)
    # The start is looked up, not the storage itself: that may lie anywhere, in another allocation of this process too.
    if info.base != start or sum(descriptor.span()) > info.size:
        raise MappingBoundsError(
            f"a storage of {descriptor.storage_bytes} bytes is said to lie at byte {descriptor.storage_start} of an "
            f"allocation of which {info.size} bytes are mapped"
        )
    return storage
