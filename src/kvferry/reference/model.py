"""A Llama-shaped decoder with seeded weights: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The weights are random, so the text is nonsense, but every token depends on every earlier one: all matrices keep unit
scale, and queries are sharpened (`ModelConfig.sharpness`) so that attention picks single positions out of a long
context instead of averaging it away. KV that is wrong anywhere therefore shows in the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Attend", "Model", "ModelConfig"]

# attend(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v the same) -> [T, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a model and the seed of its weights; equal configs mean equal weights on one kind of device."""

    num_layers: int = 8
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_size: int = 1408
    vocab_size: int = 2048
    sharpness: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_heads} heads: the size of a head must be whole and even"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def name(self) -> str:
        """Identifies the weights, so that KV of other weights is never taken for this model's."""
        return "reference-" + "-".join(str(value) for value in dataclasses.astuple(self))


class _Layer(NamedTuple):
    """One decoder layer; each matrix is [inputs, outputs]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """The weights, and one forward step over them. It knows nothing of caches: `Attend` is handed in."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._random = torch.Generator(device=device).manual_seed(config.seed)
        self.embedding = self._matrix(config.vocab_size, config.hidden_size, scale=1.0)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.head = self._matrix(config.hidden_size, config.vocab_size)
        half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        self._frequencies = torch.pow(10000.0, -half / config.head_dim)

    def _matrix(self, rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        """Normal weights under which a unit-variance input gives a unit-variance output."""
        weights = torch.randn(rows, columns, generator=self._random, device=self.device)
        return (weights * (1 / math.sqrt(rows) if scale is None else scale)).to(self.dtype)

    def _layer(self) -> _Layer:
        config = self.config
        kv_size = config.num_kv_heads * config.head_dim
        qkv = self._matrix(config.hidden_size, config.hidden_size + 2 * kv_size)
        qkv[:, : config.hidden_size] *= config.sharpness
        return _Layer(
            qkv=qkv,
            out=self._matrix(config.hidden_size, config.hidden_size),
            gate_up=self._matrix(config.hidden_size, 2 * config.ffn_size),
            down=self._matrix(config.ffn_size, config.hidden_size),
        )

    def step(self, tokens: torch.Tensor, start: int, attend: Attend) -> torch.Tensor:
        """Run `tokens` [T], the first at position `start`; float32 logits [vocab_size] after the last of them."""
        config = self.config
        count = tokens.shape[0]
        kv_size = config.num_kv_heads * config.head_dim
        cos, sin = self._rotation(start, count)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            q, k, v = torch.split(_normalise(x) @ layer.qkv, [config.hidden_size, kv_size, kv_size], dim=-1)
            q = _rotate(q.reshape(count, config.num_heads, config.head_dim), cos, sin)
            k = _rotate(k.reshape(count, config.num_kv_heads, config.head_dim), cos, sin)
            v = v.reshape(count, config.num_kv_heads, config.head_dim)
            x = x + attend(index, q, k, v) @ layer.out
            gate, up = (_normalise(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ layer.down
        return (_normalise(x[-1:]) @ self.head)[0].float()

    def _rotation(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim / 2] of the rotary angles of positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.device, dtype=torch.float32)
        angles = (positions[:, None] * self._frequencies)[:, None, :]
        return angles.cos(), angles.sin()


def _normalise(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32 (its gain is one), back in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [T, heads, head_dim] by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
