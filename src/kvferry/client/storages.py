"""An engine's KV cache on its way to the server: tensors become storages, wrappers, planes, and a nonce in each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import KVFerryError, LayoutError, ShareError
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.policy import IPCPolicy
from kvferry.ipc.shared_memory import find_segment, rehome
from kvferry.ipc.wrapper import DeviceIPCWrapper
from kvferry.layout import KVLayout, LayoutHints, TensorView, describe
from kvferry.protocol.messages import NONCE_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


@dataclass(frozen=True, slots=True, eq=False)
class Storages:
    """Each distinct storage once: as flat bytes, wrapped; with the layout of the tensors over them."""

    layout: KVLayout
    flats: tuple[torch.Tensor, ...]
    wrappers: tuple[DeviceIPCWrapper, ...]

    @property
    def device(self) -> torch.device:
        """The one device that all are on."""
        return self.flats[0].device

    @property
    def device_uuid(self) -> str:
        """Its UUID; "" for the host."""
        return self.wrappers[0].device_uuid

    def synchronize(self) -> None:
        """Wait until what was queued on the current stream is in memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Stop exporting. Idempotent."""
        for wrapper in self.wrappers:
            wrapper.close()


class Nonces:
    """Random bytes at the start of each storage; what was there comes back at the end of `with`."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._heads = [flat[:NONCE_BYTES] for flat in storages.flats]
        self._before = [head.clone() for head in self._heads]
        self._written = [os.urandom(len(head)) for head in self._heads]
        for head, nonce in zip(self._heads, self._written, strict=True):
            head.copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        storages.synchronize()

    def check(self, read: Sequence[bytes]) -> None:
        """Raise ShareError unless the server has read exactly these."""
        if len(read) != len(self._written):
            raise ShareError(f"the server mapped {len(read)} storages of {len(self._written)}")
        for index, (here, there) in enumerate(zip(self._written, read, strict=True)):
            if here != there:
                wrapper = self._storages.wrappers[index]
                raise ShareError(
                    f"the server reads other bytes than were written into storage {index} ({wrapper!r}), so it has not "
                    "mapped this memory: check that both processes see the same devices and, for kinds of sharing "
                    "that need it, one pid namespace"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for head, before in zip(self._heads, self._before, strict=True):
            head.copy_(before)
        self._storages.synchronize()


def prepare_storages(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    format: str,
    hints: Mapping[str, Any] | LayoutHints | None,
    policy: IPCPolicy,
) -> Storages:
    """Describe and wrap the storages of an engine's tensors, in the order of `kv_caches`.

    CPU tensors in ordinary memory are moved to shareable memory first, in place: same objects, same values.

    Raises LayoutError where the tensors do not fit the format or the hints, ShareError where they cannot be shared.
    """
    tensors = list(kv_caches.values())
    if not tensors:
        raise LayoutError("kv_caches is empty; give the tensors of all layers")
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError("kv_caches are on several devices; register those of one device with one client each")
    _make_shareable(tensors, policy)
    storages = _by_address(tensors)
    order = {address: number for number, address in enumerate(storages)}
    views = [_view(tensor, order[tensor.untyped_storage().data_ptr()]) for tensor in tensors]
    hints = hints if isinstance(hints, LayoutHints) else LayoutHints.from_mapping(hints)
    layout = describe(format, views, hints, names=list(kv_caches))
    flats = tuple(_flat(tensor) for tensor in storages.values())
    layout.validate([flat.numel() for flat in flats])
    wrappers: list[DeviceIPCWrapper] = []
    try:
        for flat in flats:
            wrappers.append(policy.choose(flat)(flat))
    except KVFerryError:
        for wrapper in wrappers:
            wrapper.close()
        raise
    return Storages(layout, flats, tuple(wrappers))


def _by_address(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """One tensor of each distinct storage, by the storage's address, in order of first use."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return found


def _make_shareable(tensors: Sequence[torch.Tensor], policy: IPCPolicy) -> None:
    first = next(iter(_by_address(tensors).values()))
    if not issubclass(policy.choose(first), HostIPCWrapper):
        return
    private = [
        tensor
        for tensor in tensors
        if find_segment(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) is None
    ]
    if private:
        rehome(private)


def _view(tensor: torch.Tensor, storage: int) -> TensorView:
    return TensorView(
        storage=storage,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        storage_offset=int(tensor.storage_offset()),
        itemsize=tensor.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
