"""The paged KV cache of the reference engine, and attention over it by gathering blocks.

One storage holds all layers; `layers[l]` is that layer's view [2, num_blocks, block_size, kv_heads, head_dim] (K, then
V), which is the shape and order that vLLM's FlashAttention back end uses. A sequence owns a block table: token t lies
in slot `t % block_size` of block `table[t // block_size]`.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Sequence

import torch

from kvferry.reference.model import Attend, ModelConfig

__all__ = ["BlockPool", "PagedCache", "PagedConfig", "attention"]


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """Size of a paged cache; `block_size` is in tokens."""

    num_blocks: int
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1:
            raise ValueError(f"{self.num_blocks} blocks of {self.block_size} tokens: both must be at least 1")


class BlockPool:
    """The free blocks of a cache. Shuffled, because in a served engine free blocks are never in order."""

    def __init__(self, num_blocks: int, shuffle_seed: int | None = 0) -> None:
        order = list(range(num_blocks))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(order)
        self._free = deque(order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises `MemoryError` and takes none where there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} free; give the cache more blocks")
        return [self._free.popleft() for _ in range(count)]

    def free(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)


class PagedCache:
    """KV of all layers in one storage."""

    def __init__(self, model: ModelConfig, config: PagedConfig, device: torch.device, dtype: torch.dtype) -> None:
        shape = (model.num_layers, 2, config.num_blocks, config.block_size, model.num_kv_heads, model.head_dim)
        self.config = config
        # Only the views are kept: a cache client may move host memory to a shareable segment under these very objects.
        self.layers = list(torch.zeros(shape, device=device, dtype=dtype).unbind(0))

    def named_layers(self) -> dict[str, torch.Tensor]:
        """The views under the names that an engine would register them with."""
        return {f"model.layers.{index}.self_attn": layer for index, layer in enumerate(self.layers)}

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def attend(self, blocks: Sequence[int], start: int, count: int) -> Attend:
        """What `Model.step` calls for tokens start .. start + count - 1 of the sequence with block table `blocks`.

        It writes their K and V into the cache, then attends over everything from position 0.
        """
        size = self.config.block_size
        end = start + count
        device = self.layers[0].device
        table = torch.tensor(blocks[: -(-end // size)], device=device)
        positions = torch.arange(start, end, device=device)
        slots = table[positions // size] * size + positions % size

        def attend_layer(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for cached, new in zip(self.layers[layer], (k, v), strict=True):
                cached.view(-1, *cached.shape[2:])[slots] = new
            keys, values = (cached[table].flatten(0, 1)[:end] for cached in self.layers[layer])
            return attention(q, keys, values)

        return attend_layer


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T positions q [T, heads, dim] over k, v [L, kv_heads, dim]; [T, heads * dim]."""
    count, num_heads, dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    q = q.view(count, num_kv_heads, group, dim).permute(1, 2, 0, 3).reshape(num_kv_heads, group * count, dim)
    scores = (q @ k.permute(1, 2, 0)).float().mul_(1 / math.sqrt(dim)).view(num_kv_heads, group, count, length)
    if count > 1:
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., length - count :].masked_fill_(future, -math.inf)
    weights = scores.softmax(dim=-1).to(v.dtype).view(num_kv_heads, group * count, length)
    mixed = (weights @ v.permute(1, 0, 2)).view(num_kv_heads, group, count, dim)
    return mixed.permute(2, 0, 1, 3).reshape(count, num_heads * dim)
