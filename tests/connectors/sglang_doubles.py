"""SGLang as far as KVferry asks it: its pools, its page hashes, the classes to derive from."""

from __future__ import annotations

import enum
import hashlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
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
    kind = f"M{'LA' if shared else 'HA'}TokenToKVPoolHost"
    return named(other.pop("kind", kind), **(found | other))


def named(kind: str, **fields: Any) -> SimpleNamespace:
    """An object of a class of that name."""
    found = type(kind, (SimpleNamespace,), {})(**fields)
    assert isinstance(found, SimpleNamespace)
    return found


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


class HiCacheStorage:
    """What a storage back end derives from."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host


class UnifiedCacheLinker:
    """What an external linker derives from."""

    forward_stream: Any = None


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"


@dataclass
class PoolTransfer:
    name: PoolName
    keys: list[str] | None = None
    device_indices: torch.Tensor | None = None


def install(monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
    """Have `sglang` be a stand-in in which an engine was started with `args`."""
    names = ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.unified_cache")
    for name in names:
        monkeypatch.setitem(sys.modules, f"sglang{name}", ModuleType(f"sglang{name}"))
    said = {"model_path": "/models/tiny", "dtype": "float32", "kv_cache_dtype": "auto", **args}
    made: dict[str, dict[str, Any]] = {
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolName": PoolName,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {"UnifiedCacheLinker": UnifiedCacheLinker},
        "sglang.srt.runtime_context": {"get_server_args": lambda: SimpleNamespace(**said)},
    }
    for name, content in made.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("storage", "linker"):
        monkeypatch.delitem(sys.modules, f"kvferry.connectors.sglang.{name}", raising=False)
