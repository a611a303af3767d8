"""An engine's KV cache on its way to the server: tensors become storages, wrappers and planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import KVFerryError, LayoutError
from kvferry.ipc.flat import storage_bytes
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.policy import IPCPolicy
from kvferry.ipc.shared_memory import find_segment, rehome
from kvferry.ipc.wrapper import DeviceIPCWrapper
from kvferry.layout import KVLayout, LayoutHints, describe, view_tensors


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

    @property
    def device_ordinal(self) -> int | None:
        """Its number in this process; None for the host."""
        return self.wrappers[0].device_ordinal

    def covers(self, layout: KVLayout, flats: Sequence[torch.Tensor]) -> bool:
        """Whether that is the very same memory, laid out alike."""
        return layout == self.layout and [_place(flat) for flat in flats] == [_place(flat) for flat in self.flats]

    def synchronize(self) -> None:
        """Wait until what was queued on the current stream is in memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Stop exporting. Idempotent."""
        for wrapper in self.wrappers:
            wrapper.close()


def describe_storages(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    format: str,
    hints: Mapping[str, Any] | LayoutHints | None,
    policy: IPCPolicy,
) -> tuple[KVLayout, tuple[torch.Tensor, ...]]:
    """The layout of an engine's tensors in the order of `kv_caches`, and all bytes of each distinct storage.

    CPU tensors in ordinary memory are moved to shareable memory first, in place: same objects, same values.

    Raises LayoutError where the tensors do not fit the format or the hints.
    """
    tensors = _check_tensors(kv_caches)
    _make_shareable(tensors, policy)
    views, owners = view_tensors(tensors)
    hints = hints if isinstance(hints, LayoutHints) else LayoutHints.from_mapping(hints)
    layout = describe(format, views, hints, names=list(kv_caches))
    flats = tuple(storage_bytes(tensor) for tensor in owners)
    layout.validate([flat.numel() for flat in flats])
    return layout, flats


def wrap_storages(layout: KVLayout, flats: Sequence[torch.Tensor], policy: IPCPolicy) -> Storages:
    """Storages that can be given to a server. Raises ShareError where they cannot be shared."""
    wrappers: list[DeviceIPCWrapper] = []
    try:
        for flat in flats:
            wrappers.append(policy.choose(flat)(flat))
    except KVFerryError:
        for wrapper in wrappers:
            wrapper.close()
        raise
    return Storages(layout, tuple(flats), tuple(wrappers))


def _check_tensors(kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    given: object = kv_caches
    if not isinstance(given, Mapping):
        raise LayoutError(f"kv_caches is a {type(kv_caches).__name__}; give a mapping from layer names to tensors")
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            what = f"kv_caches[{name!r}] is a {type(tensor).__module__}.{type(tensor).__name__}"
            raise LayoutError(f"{what}; names are strings, and values torch tensors")
    tensors = list(kv_caches.values())
    if not tensors:
        raise LayoutError("kv_caches is empty; give the tensors of all layers")
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError("kv_caches are on several devices; register those of one device with one client each")
    return tensors


def _place(flat: torch.Tensor) -> tuple[torch.device, int, int]:
    return flat.device, flat.data_ptr(), flat.numel()


def _make_shareable(tensors: Sequence[torch.Tensor], policy: IPCPolicy) -> None:
    if not issubclass(policy.choose(tensors[0]), HostIPCWrapper):
        return
    private = [
        tensor
        for tensor in tensors
        if find_segment(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) is None
    ]
    if private:
        rehome(private)
