"""What describes a KV cache from outside: its tensors as views of storages, and what an engine's configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.errors import LayoutError


class TensorView(msgspec.Struct, frozen=True):
    """One tensor, seen from outside: where it lies in which storage. Strides and offset are in elements."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    itemsize: int
    dtype: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise LayoutError(f"shape {self.shape} and stride {self.stride} have different numbers of axes")
        if min(self.storage, self.storage_offset) < 0 or self.itemsize < 1:
            raise LayoutError(f"{self}: storage and offset start at 0, itemsize at 1")


class LayoutHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine's configuration says about its tensors. 0 and "" stand for "not said".

    Hints never overrule tensors: where they contradict, registering fails. `num_blocks` with `tokens_per_block` also
    tells that several of the tensor's (kernel) blocks make one block of the engine.
    """

    kv_layout: str = ""
    tokens_per_block: int = 0
    num_blocks: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    isa: str = ""

    def __post_init__(self) -> None:
        if self.kv_layout not in ("", "NHD", "HND"):
            raise LayoutError(f"kv_layout is {self.kv_layout!r}; it must be 'NHD' or 'HND'")
        numbers = (self.tokens_per_block, self.num_blocks, self.num_layers, self.num_kv_heads, self.head_dim)
        if min(numbers) < 0:
            raise LayoutError(f"{self}: no number may be negative")

    @classmethod
    def from_mapping(cls, hints: Mapping[str, Any] | None) -> LayoutHints:
        """Hints out of an engine's dictionary. Raises LayoutError for unknown keys and wrong types."""
        try:
            return msgspec.convert(dict(hints or {}), cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise LayoutError(f"layout hints {hints!r}: {error}; known hints: {known}") from None


NO_HINTS = LayoutHints()
