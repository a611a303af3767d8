"""Which wrapper a tensor gets: by name, by the two switches, or by what the driver says about its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvferry.cuda.memory import MemoryKind, pointer_info
from kvferry.errors import UnsupportedMemoryError
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.shared_memory import find_segment
from kvferry.ipc.torch_storage import CudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wrapper import DeviceIPCWrapper

if TYPE_CHECKING:
    import torch

_BY_NAME: Mapping[str, type[DeviceIPCWrapper]] = MappingProxyType(
    {"torch": CudaIPCWrapper, "raw": RawCudaIPCWrapper, "vmm": VmmCudaIPCWrapper, "host": HostIPCWrapper}
)
_BY_KIND: Mapping[MemoryKind, type[DeviceIPCWrapper]] = MappingProxyType(
    {
        MemoryKind.HOST: HostIPCWrapper,
        MemoryKind.PINNED: HostIPCWrapper,
        MemoryKind.LEGACY: RawCudaIPCWrapper,
        MemoryKind.VMM: VmmCudaIPCWrapper,
    }
)


@dataclass(frozen=True)
class IPCPolicy:
    """How tensors and events are shared.

    Parameters
    ----------
    wrapper
        "torch", "raw", "vmm" or "host" for that class and no other: one kind of IPC never falls back to another.
        "auto" asks the driver what the memory is: legacy-IPC-capable is raw, VMM is vmm, host is host.
    isolated_ipc
        The processes share no `/dev/shm` (isolated containers): events are timeline semaphores.
    """

    wrapper: str = "auto"
    isolated_ipc: bool = False

    def __post_init__(self) -> None:
        if self.wrapper != "auto" and self.wrapper not in _BY_NAME:
            raise ValueError(f"wrapper {self.wrapper!r} is unknown: choose one of auto, {', '.join(_BY_NAME)}")

    @classmethod
    def from_switches(cls, isolated_ipc: bool, use_vmm_api: bool) -> IPCPolicy:
        """The policy of the two switches: vmm where `use_vmm_api`, else raw where `isolated_ipc`, else torch."""
        wrapper = "vmm" if use_vmm_api else "raw" if isolated_ipc else "torch"
        return cls(wrapper=wrapper, isolated_ipc=isolated_ipc)

    def choose(self, tensor: torch.Tensor) -> type[DeviceIPCWrapper]:
        """The class for `tensor`.

        Raises
        ------
        UnsupportedMemoryError
            "auto" met memory that no wrapper can share.
        """
        if self.wrapper != "auto":
            return _BY_NAME[self.wrapper]
        if find_segment(tensor.data_ptr(), 1) is not None:
            return HostIPCWrapper  # a segment of our own: nothing to ask
        kind = pointer_info(tensor.data_ptr()).kind
        if kind not in _BY_KIND:
            raise UnsupportedMemoryError(
                f"{kind.value} cannot be shared with another process: allocate the tensor by torch's "
                "caching allocator, cudaMalloc, the VMM API or kvferry.ipc.allocate_shared"
            )
        return _BY_KIND[kind]


def wrap(tensor: torch.Tensor, policy: IPCPolicy | None = None) -> DeviceIPCWrapper:
    """Export `tensor` for another process, by the wrapper that `policy` chooses; the caller closes it.

    Raises
    ------
    NotContiguousError
        The tensor's bytes are not one dense run.
    UnsupportedMemoryError
        The wrapper cannot express that kind of memory.
    """
    return (policy or IPCPolicy()).choose(tensor)(tensor)
