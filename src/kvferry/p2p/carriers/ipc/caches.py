"""KV caches as they go from one engine to the other: what this one gives, and what it has mapped of a peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import torch

from kvferry.copy.pairs import BlockPairs
from kvferry.cuda.memory import let_device_reach
from kvferry.errors import KVFerryError, LayoutError, WireError
from kvferry.ipc.captures import beside_captures
from kvferry.ipc.policy import wrap
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wrapper import DeviceIPCWrapper
from kvferry.layout import KVLayout
from kvferry.p2p.caches import KVCaches, places_of
from kvferry.p2p.carriers.runs import Int64s
from kvferry.p2p.geometry import Piece, check_geometry
from kvferry.p2p.memory import BlockMemory, FlatMemory, Memory
from kvferry.p2p.signal.messages import About
from kvferry.p2p.signal.session import Session

_MAX_KNOWN = 512

Places = list[tuple[int, int, int]]  # address in block 0, stride, bytes
TargetsOf = Callable[[int, Sequence[Piece]], Places]
Layers = Annotated[tuple[KVLayout, ...], msgspec.Meta(max_length=4096)]


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """The storages of this engine's KV caches, wrapped, and where each layer lies in them; nothing without caches."""

    wrappers: tuple[DeviceIPCWrapper, ...] = ()
    layers: tuple[KVLayout, ...] = ()
    storages: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, caches: KVCaches) -> Exported:
        """Raises ShareError (UnsupportedMemoryError) where they lie in memory that no other process can map."""
        wrappers: list[DeviceIPCWrapper] = []
        try:
            for storage in caches.storages:
                wrappers.append(wrap(storage))
        except KVFerryError:
            for wrapper in wrappers:
                wrapper.close()
            raise
        return cls(tuple(wrappers), caches.layers, caches.storages)

    @property
    def device_uuid(self) -> str:
        """Of the GPU that they are on; "" for the host."""
        return self.wrappers[0].device_uuid if self.wrappers else ""

    @property
    def device(self) -> int | None:
        """Its number in this process; None for the host."""
        return self.wrappers[0].device_ordinal if self.wrappers else None

    def close(self) -> None:
        """Idempotent; peers keep what they have mapped."""
        for wrapper in self.wrappers:
            wrapper.close()


@dataclass(slots=True, eq=False)
class PeerCaches:
    """A peer's KV caches, mapped here. `close` at any time that no copy runs. Idempotent."""

    about: About
    layers: tuple[KVLayout, ...]
    wrappers: Sequence[DeviceIPCWrapper]
    own: Exported
    tensors: list[torch.Tensor] = field(default_factory=list)
    _for_caches: KVCaches | None = None
    _by_items: dict[tuple[Session, tuple[int, ...]], Int64s] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return self.layers[0].num_blocks if self.layers else 0

    @property
    def same_gpu(self) -> bool:
        """Whether both engines use one GPU."""
        return bool(self.wrappers) and self.wrappers[0].device_uuid == self.own.device_uuid != ""

    def open(self) -> None:
        """Check what came, and map it.

        Raises KVFerryError where it does not fit what the peer said of itself, cannot be mapped, or is out of reach of
        this engine's device.
        """
        self._check()
        own = self.own.device
        with beside_captures(own):
            for wrapper in self.wrappers:
                if own is None or self.same_gpu:
                    self.tensors.append(wrapper.to_tensor())
                else:
                    self.tensors.append(_reached_from(own, wrapper))

    def close(self) -> None:
        """Let go of the memory; it is unmapped at once."""
        self.tensors.clear()
        for wrapper in self.wrappers:
            wrapper.close()

    def pairs(self, session: Session, items: Sequence[int], destination: Memory, from_ids: Int64s) -> BlockPairs:
        """The copy of some layers of a transfer whose blocks are `from_ids` at the peer."""
        if isinstance(destination, BlockMemory):
            pieces, to_ids = self._known_pieces(session, tuple(items), destination.caches), destination.ids
        else:
            blocks = len(from_ids)
            flat = partial(_flat_places, destination, blocks)
            pieces, to_ids = self._pieces(session, items, flat), np.arange(blocks)
        return BlockPairs(pieces, to_ids.astype(np.int32), from_ids.astype(np.int32))

    def _known_pieces(self, session: Session, items: tuple[int, ...], caches: KVCaches) -> Int64s:
        """From cache to cache they are the same in all transfers of a session: worked out once for the same layers."""
        key = session, items
        if caches is not self._for_caches or len(self._by_items) >= _MAX_KNOWN:
            self._for_caches = caches
            self._by_items.clear()
        if key not in self._by_items:
            self._by_items[key] = self._pieces(
                session, items, lambda item, mine: places_of(caches.layers[item], caches.storages, mine)
            )
        return self._by_items[key]

    def _pieces(self, session: Session, items: Sequence[int], targets_of: TargetsOf) -> Int64s:
        columns: list[tuple[int, int, int, int, int]] = []
        for item in items:
            sources = places_of(self.layers[item], self.tensors, session.peer_pieces(item))
            targets = targets_of(item, session.pieces(item))
            for (to, to_stride, nbytes), (source, from_stride, _) in zip(targets, sources, strict=True):
                columns.append((to, to_stride, source, from_stride, nbytes))
        pieces: Int64s = np.array(columns, dtype=np.int64).T
        return pieces

    def _check(self) -> None:
        geometry = self.about.geometry
        if geometry is not None:
            check_geometry(geometry)
        lengths = [] if geometry is None else [geometry.kinds[kind].lengths for kind in geometry.layers]
        if lengths != [tuple(plane.length for plane in layer.planes) for layer in self.layers]:
            raise LayoutError("the peer's KV caches are not laid out as it said")
        if len({layer.num_blocks for layer in self.layers}) > 1:
            raise LayoutError("the layers of the peer's KV caches have different numbers of blocks")
        for wrapper in self.wrappers:
            if wrapper.dtype is not torch.uint8 or len(wrapper.shape) != 1 or wrapper.stride != (1,):
                raise WireError(f"{wrapper!r} is no storage; each is one dense run of uint8")
            if self.own.wrappers and bool(wrapper.device_uuid) != bool(self.own.device_uuid):
                where = wrapper.device_uuid or "the host"
                raise LayoutError(f"KV caches on {where} there and on {self.own.device_uuid or 'the host'} here")
        sizes = [wrapper.shape[0] for wrapper in self.wrappers]
        for layer in self.layers:
            layer.validate(sizes)


def _flat_places(destination: FlatMemory, blocks: int, item: int, pieces: Sequence[Piece]) -> Places:
    """All blocks of the first piece of an item, then those of the second."""
    places, at = [], destination.items[item][0]
    for piece in pieces:
        places.append((at, piece.length, piece.length))
        at += blocks * piece.length
    return places


def _reached_from(own: int, wrapper: DeviceIPCWrapper) -> torch.Tensor:
    """Memory of another GPU, as kernels of the device `own` reach it."""
    if isinstance(wrapper, RawCudaIPCWrapper):
        return wrapper.to_tensor_for(own)
    tensor = wrapper.to_tensor()
    if isinstance(wrapper, VmmCudaIPCWrapper):
        let_device_reach(own, tensor.data_ptr())
    return tensor
