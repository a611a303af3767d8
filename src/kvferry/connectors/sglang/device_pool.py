"""SGLang's KV cache on the device: which tensors it has, and which set-ups a linker cannot serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from kvferry.connectors.sglang.staging import numbers_of_pages
from kvferry.errors import LayoutError

# By name: a subclass may keep more than its tensors show (scales, an indexer's keys, states).
_PLAIN, _LATENT = "MHATokenToKVPool", "MLATokenToKVPool"


def device_caches(pool: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of a device pool by name, layer by layer: keys and values, or latents.

    Raises LayoutError for a pool of another kind.
    """
    kind = type(pool).__name__
    start = int(getattr(pool, "start_layer", 0) or 0)
    if kind == _PLAIN:
        pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
        found = {
            f"{name}.{start + layer}": tensor
            for layer, pair in enumerate(pairs)
            for name, tensor in zip("kv", pair, strict=True)
        }
    elif kind == _LATENT:
        found = {f"latent.{start + layer}": tensor for layer, tensor in enumerate(pool.kv_buffer)}
    else:
        raise LayoutError(
            f"SGLang keeps this model's KV in a {kind}: KVferry's linker serves {_PLAIN} and {_LATENT} only. Start the "
            "engine without it"
        )
    for name, tensor in found.items():
        if tensor.dim() != 3:
            raise LayoutError(f"{kind}: {name} has the shape {tuple(tensor.shape)}; expected [tokens, heads, elements]")
    return found


def num_layers(caches: Mapping[str, torch.Tensor]) -> int:
    """How many layers the tensors of `device_caches` are, where each has as many planes, one layer after the other.

    1 where that is not so: layers of several shapes, or that share memory.
    """
    layers: dict[str, list[object]] = {}
    for name, tensor in caches.items():
        layers.setdefault(name.rpartition(".")[2], []).append((tensor.shape, tensor.stride(), tensor.dtype))
    first, *others = layers.values()
    num_places = len({tensor.data_ptr() for tensor in caches.values()})
    return len(layers) if num_places == len(caches) and all(layer == first for layer in others) else 1


def is_latent(pool: Any) -> bool:
    """Whether every tensor-parallel rank has the same."""
    return type(pool).__name__ == _LATENT


def check_set_up(components: Collection[Any], server_args: Any) -> None:
    """Raise LayoutError where a rank's pages do not restore all of the cache's state."""
    if (getattr(server_args, "dcp_size", 1) or 1) > 1:
        raise LayoutError("decode context parallelism is on: each rank has other tokens of a page; not supported")
    names = sorted(str(getattr(component, "name", component)) for component in components)
    if names != ["FULL"]:
        raise LayoutError(
            f"the model's cache has the components {', '.join(names)}: KVferry's linker serves models with full "
            "attention only. Start the engine without it"
        )


def block_ids(device_indices: torch.Tensor, page_tokens: int) -> list[int]:
    """The pages that device indices stand for. Raises ValueError for what are not whole pages, in order."""
    return numbers_of_pages(device_indices.cpu(), page_tokens)
