"""SGLang's host pools, as far as a storage back end asks them, and its page hashes."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import torch

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGE = 4
LAYERS, HEADS, DIM = 3, 2, 8


def host_pool(layout: str = "page_first", /, *, pages: int = 12, shared: bool = False, **other: Any) -> SimpleNamespace:
    """A pool whose every element is another number; `shared`: latents, without the axis of K and V."""
    tokens = pages * PAGE
    heads = 1 if shared else HEADS
    shape = {
        "layer_first": (LAYERS, tokens, heads, DIM),
        "page_first": (tokens, LAYERS, heads, DIM),
        "page_first_direct": (pages, LAYERS, PAGE, heads, DIM),
        "page_head": (pages, heads, PAGE, LAYERS, DIM),
    }[layout]
    shape = shape if shared else (2, *shape)
    buffer = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    fields = {"head_num": HEADS, "head_dim": DIM} if not shared else {}
    found = {
        "kv_buffer": buffer,
        "layout": layout,
        "page_size": PAGE,
        "layer_num": LAYERS,
        "start_layer": 0,
        "end_layer": LAYERS,
        **fields,
    }
    return SimpleNamespace(**(found | other))


def token(pool: SimpleNamespace, number: int, *, shared: bool = False) -> torch.Tensor:
    """All that the pool holds of one token: (K and V,) layers, heads and elements."""
    data = pool.kv_buffer if not shared else pool.kv_buffer[None]
    page, place = divmod(number, PAGE)
    found = {
        "layer_first": lambda: data[:, :, number],
        "page_first": lambda: data[:, number],
        "page_first_direct": lambda: data[:, page, :, place],
        "page_head": lambda: data[:, page, :, place].transpose(1, 2),
    }[pool.layout]()
    return torch.clone(found)


def indices(*pages: int) -> torch.Tensor:
    """SGLang's token indices of these pages."""
    return torch.tensor([page * PAGE + place for page in pages for place in range(PAGE)], dtype=torch.int64)


def hashes(text: str, count: int) -> list[str]:
    """The page hashes of a prompt of that name: a chain."""
    made = [hashlib.sha256(text.encode()).hexdigest()]
    while len(made) < count:
        made.append(hashlib.sha256(bytes.fromhex(made[-1])).hexdigest())
    return made


def data(keys: list[str]) -> bytes:
    return b"".join(map(bytes.fromhex, keys))
