"""What is sent, and where it lands: memory as the carriers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import NotContiguousError, UnsupportedMemoryError
from kvferry.ipc.descriptor import DTYPES
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.geometry import Piece
from kvferry.p2p.signal.messages import TensorMeta

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FlatMemory:
    """Items that lie as single runs: addresses and sizes. `owner` keeps the memory."""

    items: tuple[tuple[int, int], ...]
    owner: object

    def runs(self, item: int, _pieces: Sequence[Piece]) -> ByteRuns:
        """The bytes of one item."""
        return ByteRuns.single(*self.items[item], self.owner)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMemory:
    """Blocks of registered KV caches; the items are the layers."""

    caches: KVCaches
    ids: Int64s

    def without(self, skip_blocks: int) -> BlockMemory:
        """The same without its first blocks."""
        return BlockMemory(self.caches, self.ids[skip_blocks:])

    def runs(self, item: int, pieces: Sequence[Piece]) -> ByteRuns:
        """The bytes of one layer's blocks."""
        return self.caches.runs(item, pieces, self.ids)


Memory: TypeAlias = FlatMemory | BlockMemory


def flat_memory(tensor: torch.Tensor, device: int | None = None) -> FlatMemory:
    """A tensor's own bytes, of the host or of this engine's GPU, where it has one.

    Raises UnsupportedMemoryError, NotContiguousError; nothing is ever copied.
    """
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UnsupportedMemoryError(f"tensors of {tensor.dtype} cannot be moved")
    if tensor.device.type != "cpu" and (tensor.device.type != "cuda" or tensor.device.index != device):
        own = "is for host memory" if device is None else f"is for GPU {device} and host memory"
        raise UnsupportedMemoryError(f"a tensor on {tensor.device}, and this engine {own} (P2pConfig.device)")
    if not tensor.is_contiguous():
        raise NotContiguousError(f"shape {tuple(tensor.shape)} with stride {tuple(tensor.stride())} is not contiguous")
    return FlatMemory(((tensor.data_ptr(), tensor.numel() * tensor.element_size()),), tensor)


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """What a peer has to know of a tensor."""
    return TensorMeta(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_of(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Flat bytes as the tensor that they are."""
    return flat.view(DTYPES[meta.dtype]).reshape(meta.shape)
