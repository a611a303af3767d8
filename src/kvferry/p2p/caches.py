"""The KV caches that an engine has registered: layer by layer, as planes of their storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.copy.plan import check_ids
from kvferry.errors import BlockIdError, LayoutError
from kvferry.ipc.flat import storage_bytes
from kvferry.layout import KVLayout, LayoutHints, describe, view_tensors
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.geometry import Piece, planes_of
from kvferry.p2p.signal.messages import Geometry, LayerGeometry

Int64s = npt.NDArray[np.int64]
_MAX_KNOWN = 8192


@dataclass(frozen=True, slots=True, eq=False)
class KVCaches:
    """One rank's KV caches, which it keeps alive. `layers` are the layouts of the distinct tensors, in their order."""

    layout: KVLayout
    layers: tuple[KVLayout, ...]
    storages: tuple[torch.Tensor, ...]
    _places: dict[tuple[int, tuple[Piece, ...]], Int64s] = field(default_factory=dict)  # worked out once

    @classmethod
    def describe(
        cls, kv_caches: Mapping[str, torch.Tensor], format: str, hints: Mapping[str, Any] | LayoutHints | None = None
    ) -> KVCaches:
        """Raises LayoutError where the tensors do not fit the format or the hints, or are on several devices."""
        if not isinstance(kv_caches, Mapping):
            raise LayoutError(f"kv_caches is of type {type(kv_caches).__name__}; give a tensor for each layer's name")
        if not kv_caches or len({tensor.device for tensor in kv_caches.values()}) > 1:
            raise LayoutError("kv_caches are empty or on several devices; give those of one device to one engine")
        views, owners = view_tensors(kv_caches.values())
        storages = tuple(storage_bytes(tensor) for tensor in owners)
        hints = hints if isinstance(hints, LayoutHints) else LayoutHints.from_mapping(hints)
        whole = describe(format, views, hints, names=list(kv_caches))
        whole.validate([flat.numel() for flat in storages])
        alone = msgspec.structs.replace(hints, num_layers=0)  # it is that of all layers, and has been checked
        layers = tuple(describe(format, [view], alone) for view in dict.fromkeys(views))
        return cls(whole, layers, storages)

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks

    @property
    def device(self) -> torch.device:
        return self.storages[0].device

    @property
    def geometry(self) -> Geometry:
        """What a peer has to know of it."""
        itemsizes = [_itemsize(layer) for layer in self.layers]
        described = [
            LayerGeometry(layer.axis_order, size, layer.dtype, tuple(plane.length for plane in layer.planes))
            for layer, size in zip(self.layers, itemsizes, strict=True)
        ]
        kinds = tuple(dict.fromkeys(described))
        return Geometry(
            block_size=self.layout.block_size,
            num_kv_heads=0 if self.layout.format == "mla" else self.layout.num_kv_heads,
            names=tuple(",".join(names) for names in self.layout.layer_names),
            kinds=kinds,
            layers=tuple(kinds.index(layer) for layer in described),
        )

    def check_ids(self, block_ids: Sequence[int] | Int64s) -> Int64s:
        """The ids as an array. Raises BlockIdError for ids outside the cache, twice in it, or none at all."""
        ids = np.asarray(block_ids)
        if ids.ndim != 1 or not len(ids):
            raise BlockIdError(f"{ids.size} block ids in {ids.ndim} dimensions; give a list of at least one")
        if ids.dtype.kind not in "iu":
            raise BlockIdError(f"block ids are {ids.dtype}; give whole numbers")
        ids = ids.astype(np.int64, copy=False)
        check_ids(ids, self.num_blocks)
        return ids

    def places(self, layer: int, pieces: Sequence[Piece]) -> Int64s:
        """Rows with the address in block 0, the stride and the bytes of each piece of one layer's blocks."""
        key = layer, tuple(pieces)
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= _MAX_KNOWN:
                self._places.clear()
            rows = places_of(self.layers[layer], self.storages, pieces)
            found = self._places[key] = np.array(rows, dtype=np.int64).T
        return found

    def runs(self, layer: int, pieces: Sequence[Piece], ids: Int64s) -> ByteRuns:
        """The bytes of `pieces` of one layer's blocks: all blocks of the first piece, then those of the second."""
        starts, strides, lengths = self.places(layer, pieces)[:, :, None]
        return ByteRuns((starts + ids * strides).ravel(), np.repeat(lengths.ravel(), len(ids)), self)


def places_of(layer: KVLayout, storages: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Address in block 0, stride and bytes of each piece of one layer's blocks."""
    planes = planes_of(layer, pieces)
    return [(storages[plane.storage].data_ptr() + plane.offset, plane.stride, plane.length) for plane in planes]


def _itemsize(layer: KVLayout) -> int:
    return int(getattr(torch, layer.dtype).itemsize)
