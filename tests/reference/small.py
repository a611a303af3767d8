"""A model small enough for tests, and a twin of its forward pass that has no pages and no steps."""

from __future__ import annotations

import torch

from kvferry.reference.model import Model, ModelConfig

SMALL_MODEL = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=256)


def dense_logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The logits after the last token: all tokens at once, in float64, through torch's own attention."""
    config = model.config
    length, dim = len(tokens), config.head_dim
    inverse = 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.arange(length).double()[:, None] * inverse
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., : dim // 2].contiguous(), x[..., dim // 2 :].contiguous()) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    x = model.embedding.double()[tokens]
    for layer in model.layers:
        heads = (norm(x) @ layer.qkv.double()).view(length, -1, dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            rotate(q).transpose(0, 1), rotate(k).transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        x = x + mixed.transpose(0, 1).reshape(length, -1) @ layer.out.double()
        gate, up = (norm(x) @ layer.gate_up.double()).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.double()
    return (norm(x)[-1] @ model.head.double()).float()
