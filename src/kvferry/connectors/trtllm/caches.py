"""What TensorRT-LLM's memory is: hints for its pool, and its regions as tensors, checked against the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connectors.trtllm.model import ModelShape
from kvferry.connectors.trtllm.refusals import ATTENTION_LAYOUTS
from kvferry.errors import LayoutError
from kvferry.layout import LayoutHints

MemoryAt = Callable[[int, int], torch.Tensor]
POOL_FORMAT, REGIONS_FORMAT = "trtllm_pool", "trtllm_regions"
# What V2 may honour of a promise it cuts between blocks, and chunks have to be no larger.
MIN_V2_BLOCK = 64
_ROLES = frozenset({"key", "value"})
_TYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, slots=True)
class Pool:
    """What is registered: tensors by name, their layout's format, and what the engine says of them."""

    tensors: dict[str, torch.Tensor]
    format: str
    hints: LayoutHints


class DeviceMemory:
    """Memory of a GPU that somebody else owns, as torch takes it: a flat tensor over it, without copying."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
            "version": 3,
        }


def device_memory(base: int, nbytes: int) -> torch.Tensor:
    """The bytes at an address of the current GPU, which their owner keeps alive."""
    return torch.as_tensor(DeviceMemory(base, nbytes), device="cuda")


def layout_hints(llm_args: Any, shape: ModelShape, dtype: torch.dtype) -> LayoutHints:
    """What the engine's configuration says of each rank's pool."""
    return LayoutHints(
        kv_layout=ATTENTION_LAYOUTS[str(getattr(llm_args, "attn_backend", "TRTLLM"))],
        tokens_per_block=int(llm_args.kv_cache_config.tokens_per_block),
        num_layers=shape.num_layers,
        num_kv_heads=shape.heads_of_rank(int(getattr(llm_args, "tensor_parallel_size", 1) or 1)),
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )


def pool_of_tensor(tensor: torch.Tensor, llm_args: Any, shape: ModelShape) -> Pool:
    """The one pool `[NB, NL, kvFactor, NH * BS * HS]` of V1. Raises LayoutError where it is not what the model says."""
    _check_dtype(tensor.dtype, llm_args)
    if tensor.dim() != 4:
        raise LayoutError(f"a KV pool of shape {tuple(tensor.shape)}; expected [NB, NL, kvFactor, NH * BS * HS]")
    if not tensor.is_contiguous():
        raise LayoutError(f"a KV pool of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous")
    if tensor.shape[1] != shape.num_layers:
        raise LayoutError(
            f"the pool has {tensor.shape[1]} layers, the model {shape.num_layers}: layers of another kind are in "
            "another pool, which no connector is given; such models are not supported"
        )
    if tensor.shape[2] != shape.kv_factor:
        raise LayoutError(f"the pool has {tensor.shape[2]} tensors a layer, the model's attention {shape.kv_factor}")
    return Pool({"pool": tensor}, POOL_FORMAT, layout_hints(llm_args, shape, tensor.dtype))


def pool_of_regions(layout: Any, llm_args: Any, shape: ModelShape, memory_at: MemoryAt) -> Pool:
    """V2's regions: page slot `i` of one lies at `base + i * stride`. Raises LayoutError for more than one group."""
    group = _only_group(layout, getattr(llm_args, "max_seq_len", None))
    _check_tokens(layout, llm_args)
    slots = {int(region.num_slots) for region in group.regions}
    if len(slots) != 1:
        raise LayoutError(f"regions of {sorted(slots)} slots in one layer group; expected the same for all")
    dtype = _region_dtype(sum(int(region.size) for region in group.regions), llm_args, shape)
    tensors: dict[str, torch.Tensor] = {}
    for cluster in _clusters(group.regions):
        start = int(cluster[0].base)
        flat = memory_at(start, max(_end(region) for region in cluster) - start).view(dtype)
        for region in cluster:
            tensors[_name(region)] = _rows(flat, region, start, dtype)
    return Pool(tensors, REGIONS_FORMAT, layout_hints(llm_args, shape, dtype))


def _only_group(layout: Any, max_seq_len: int | None) -> Any:
    groups = list(layout.groups)
    if len(groups) != 1:
        windows = [group.window_size for group in groups]
        raise LayoutError(f"{len(groups)} layer groups (windows {windows}), each with pages of its own: not supported")
    group = groups[0]
    window = group.window_size
    if window is not None and (max_seq_len is None or window < max_seq_len):
        raise LayoutError(
            f"a sliding window of {window} tokens: pages that it has passed are given to others, and no connector is "
            "told; set max_seq_len to no more than it"
        )
    if group.replicated_regions:
        raise LayoutError("the cache has regions that all ranks share (a side cache of the model): not supported")
    buffers = [buffer for region in group.regions for buffer in region.buffers]
    roles = {str(buffer.role) for buffer in buffers}
    if not roles or roles - _ROLES:
        raise LayoutError(f"buffers of the kinds {sorted(roles)}; only key and value are known")
    if any(int(getattr(buffer, "expansion", 1)) != 1 for buffer in buffers):
        raise LayoutError("layers with blocks of different sizes are not supported")
    return group


def _check_tokens(layout: Any, llm_args: Any) -> None:
    tokens, said = int(layout.tokens_per_block), int(llm_args.kv_cache_config.tokens_per_block)
    if tokens != said:
        raise LayoutError(f"the cache has {tokens} tokens a block, kv_cache_config.tokens_per_block is {said}")
    if tokens < MIN_V2_BLOCK:
        raise LayoutError(
            f"blocks of {tokens} tokens: this KV cache manager may use less of a promise than was made, to the block, "
            f"and the cache server keeps chunks of {MIN_V2_BLOCK} tokens. In kv_cache_config, set "
            f"tokens_per_block={MIN_V2_BLOCK}, or use_kv_cache_manager_v2=False"
        )


def _region_dtype(slot_bytes: int, llm_args: Any, shape: ModelShape) -> torch.dtype:
    """Regions are bytes; how large an element is, the model's sizes tell."""
    hints = layout_hints(llm_args, shape, torch.uint8)
    elements = shape.num_layers * shape.kv_factor * hints.num_kv_heads * hints.tokens_per_block * hints.head_dim
    itemsize, rest = divmod(slot_bytes, elements)
    if rest or itemsize not in _TYPES:
        raise LayoutError(f"a page slot has {slot_bytes} bytes for the {elements} elements that the model says")
    dtype = getattr(torch, str(getattr(llm_args, "dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != itemsize:
        dtype = _TYPES[itemsize]
    _check_dtype(dtype, llm_args)
    return dtype


def _check_dtype(dtype: torch.dtype, llm_args: Any) -> None:
    if not dtype.is_floating_point:
        raise LayoutError(f"a KV pool of {dtype}: NVFP4, whose scales are in another pool, or unknown; not supported")
    said = str(getattr(llm_args.kv_cache_config, "dtype", "auto")).lower()
    if said == "fp8" and dtype.itemsize != 1:
        raise LayoutError(f"kv_cache_config.dtype is fp8, the pool's {dtype}")


def _clusters(regions: Sequence[Any]) -> list[list[Any]]:
    """Regions whose slots lie among each other's: of one allocation, which is mapped once."""
    clusters: list[list[Any]] = []
    end = 0
    for region in sorted(regions, key=lambda region: int(region.base)):
        if clusters and int(region.base) < end:
            clusters[-1].append(region)
        else:
            clusters.append([region])
        end = max(end, _end(region))
    return clusters


def _end(region: Any) -> int:
    return int(region.base) + (int(region.num_slots) - 1) * int(region.stride) + int(region.size)


def _rows(flat: torch.Tensor, region: Any, start: int, dtype: torch.dtype) -> torch.Tensor:
    offset, size, stride = int(region.base) - start, int(region.size), int(region.stride)
    if any(number % dtype.itemsize for number in (offset, size, stride)):
        raise LayoutError(f"a region of {size} bytes every {stride} at {offset} holds no whole elements of {dtype}")
    shape, strides = (int(region.num_slots), size // dtype.itemsize), (stride // dtype.itemsize, 1)
    return flat.as_strided(shape, strides, offset // dtype.itemsize)


def _name(region: Any) -> str:
    """What the region holds, in its order: other orders share nothing."""
    buffers = [f"{int(buffer.layer_id)}.{buffer.role}" for buffer in region.buffers]
    digest = hashlib.sha256(",".join(buffers).encode()).hexdigest()[:32]
    return f"{buffers[0]}...{buffers[-1]}:{len(buffers)}:{digest}"
