"""What the wrappers that map another process's CUDA memory have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from kvferry.cuda.device import bound, device_uuid, ordinal_of
from kvferry.cuda.driver import driver
from kvferry.cuda.memory import MemoryKind, PointerInfo, pointer_info
from kvferry.errors import MappingBoundsError, StaleHandleError, UnsupportedMemoryError
from kvferry.ipc.descriptor import WrapperDescriptor, check_dense_run
from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingRef
from kvferry.ipc.table import LocalExport, process_table
from kvferry.ipc.wrapper import DeviceIPCWrapper

_HOST_ADVICE = "use HostIPCWrapper on a tensor made by kvferry.ipc.allocate_shared, or moved by kvferry.ipc.rehome"
_ADVICE: Mapping[MemoryKind, str] = MappingProxyType(
    {
        MemoryKind.HOST: _HOST_ADVICE,
        MemoryKind.PINNED: _HOST_ADVICE,
        MemoryKind.LEGACY: "use RawCudaIPCWrapper",
        MemoryKind.VMM: "use VmmCudaIPCWrapper",
        MemoryKind.POOL: "allocate it with cudaMalloc or torch's own allocator, then use RawCudaIPCWrapper",
        MemoryKind.MANAGED: "allocate it with cudaMalloc, then use RawCudaIPCWrapper",
    }
)


class MappedDescriptor(WrapperDescriptor, frozen=True, kw_only=True):
    """A tensor in CUDA memory that its exporter's driver numbers `buffer_id`; never used twice in one process."""

    buffer_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.device_uuid:
            raise ValueError("CUDA memory needs a device UUID")
        if not 0 <= self.buffer_id < 1 << 64:
            raise ValueError(f"bad number {self.buffer_id} of an allocation")

    def mapping_handle(self) -> bytes:
        """What tells the memory to be mapped from all other memory of its exporter."""
        raise NotImplementedError

    def span(self) -> tuple[int, int]:
        """Where in the mapped memory the tensor's bytes lie, and how many there are."""
        raise NotImplementedError

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Those bytes as the tensor that was described; any dtype, since only torch has to know it."""
        return flat.view(self.torch_dtype).reshape(self.shape)


class DenseDescriptor(MappedDescriptor, frozen=True, kw_only=True):
    """A dense run of `nbytes` bytes at byte `offset` of the mapped memory."""

    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dense_run(self, self.offset, self.nbytes, total_bytes=self.total_bytes())

    def total_bytes(self) -> int:
        """Bytes of all memory that gets mapped."""
        raise NotImplementedError

    def span(self) -> tuple[int, int]:
        return self.offset, self.nbytes


class MappedIPCWrapper(DeviceIPCWrapper):
    """An importer that maps through the process's table; in the exporting process, an alias of the memory itself."""

    def _begin(self) -> None:
        super()._begin()
        self._mapping: MappingRef | None = None  # importer: keeps the memory mapped between calls of to_tensor

    @abstractmethod
    def _map(self, device: int) -> Opened:
        """Map the described memory on `device`; called when no other wrapper of this process has done so."""

    def _open(self) -> torch.Tensor:
        return self._open_for(None)

    def _open_for(self, reader: int | None) -> torch.Tensor:
        """Map the memory in the context of the device `reader`, by default that on which it lies."""
        descriptor = self._described(MappedDescriptor)
        table = process_table()
        handle = descriptor.mapping_handle()
        if descriptor.exporter == table.token:
            return _alias(descriptor, table.exports.get(handle))
        device = ordinal_of(descriptor.device_uuid) if reader is None else reader
        if reader is not None and device_uuid(reader) != descriptor.device_uuid:
            handle += b"@%d" % reader  # each context has a mapping of its own
        key = MappingKey(descriptor.exporter, descriptor.buffer_id, handle)
        ref = table.mappings.acquire(key, partial(self._map, device))
        try:
            check_bounds(descriptor, ref.nbytes)
            self._keep(ref.share())
            return _tensor(descriptor, ref.address, device, ref)
        except BaseException:
            ref.release()
            raise

    def _keep(self, ref: MappingRef) -> None:
        with self._lock:
            kept = self._mapping is None and not self._closed
            if kept:
                self._mapping = ref
        if not kept:
            ref.release()

    def _release(self) -> None:
        if self._mapping is not None:
            self._mapping.release()


def inspect(tensor: torch.Tensor, wanted: MemoryKind, wrapper: str) -> PointerInfo:
    """What the driver says of the tensor's memory, which has to be of the `wanted` kind.

    Raises:
        UnsupportedMemoryError: it is of another; the text names its allocator and what to use.
    """
    info = pointer_info(tensor.data_ptr())
    if info.kind is wanted:
        return info
    if info.kind is MemoryKind.HOST and tensor.is_cuda:
        driver()  # a CUDA tensor, and no usable CUDA: in a forked child this raises and says so
    raise UnsupportedMemoryError(
        f"the tensor of shape {tuple(tensor.shape)} lies in {info.kind.value}, which {wrapper} cannot share: it takes "
        f"{wanted.value}. For this tensor {_ADVICE[info.kind]}"
    )


def check_bounds(descriptor: MappedDescriptor, mapped: int) -> None:
    """Refuse bytes beyond what is mapped, before any tensor over them exists."""
    offset, nbytes = descriptor.span()
    if offset < 0 or nbytes < 0 or offset + nbytes > mapped:
        raise MappingBoundsError(
            f"{descriptor.dtype}{list(descriptor.shape)} is said to lie at bytes {offset} to {offset + nbytes} of an "
            f"allocation of which {mapped} bytes are mapped"
        )


def check_alive(export: LocalExport | None, buffer_id: int) -> LocalExport:
    """The allocation of this very process behind a handle, if it is still the one that was exported."""
    if export is None or export.buffer_id != buffer_id:
        raise StaleHandleError(
            f"allocation {buffer_id} of this process is not exported any more: it was freed, and its handle belongs to "
            "another now"
        )
    now = pointer_info(export.address)
    if now.buffer_id != buffer_id or now.base != export.address:
        raise StaleHandleError(f"allocation {buffer_id} of this process, at {export.address:#x}, was freed")
    for address, number in export.parts:
        if pointer_info(address).buffer_id != number:
            raise StaleHandleError(f"the chunk at {address:#x} of allocation {buffer_id} of this process was freed")
    return export


def _alias(descriptor: MappedDescriptor, export: LocalExport | None) -> torch.Tensor:
    alive = check_alive(export, descriptor.buffer_id)
    check_bounds(descriptor, alive.nbytes)
    return _tensor(descriptor, alive.address, alive.device, None)


def _tensor(descriptor: MappedDescriptor, address: int, device: int, owner: object) -> torch.Tensor:
    """The described tensor in memory that is mapped at `address`; `owner` lives as long as any view of it."""
    offset, nbytes = descriptor.span()
    # Shaping is metadata only, but torch looks at the current device, and would begin another one's context.
    with bound(device) as drv:
        return descriptor.shaped(drv.make_tensor(address + offset, nbytes, device, owner))
