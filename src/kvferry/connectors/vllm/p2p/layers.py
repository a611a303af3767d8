"""A layer's KV as one dense tensor, taken out of the paged cache and put back."""

from __future__ import annotations

import torch

from kvferry.errors import BlockIdError, LayoutError


def extract_kv_from_layer(
    layer: torch.Tensor, block_ids: torch.Tensor, *, num_blocks: int | None = None
) -> torch.Tensor:
    """A copy of the blocks `block_ids` of one layer's paged cache, in that order.

    `layer` is what vLLM gives a connector: `[2, B, N, H, D]` (blocks at axis 1), `[B, 2, N, H, D]`, `[B, H, N, 2D]`
    (packed, of any strides), latent attention's `[B, N, C]` or `[B, 1, N, C]`. The result has the same axes with
    `len(block_ids)` blocks. `num_blocks` is how many blocks the engine has: where a kernel's are smaller, each of the
    engine's is several of the tensor's, one after the other; it also tells `[2, B, ...]` from `[B, 2, ...]` where both
    could be meant.

    Raises LayoutError for a shape that is not known, BlockIdError for ids outside the cache.
    """
    axis = _block_axis(layer, num_blocks)
    return layer.index_select(axis, _rows(layer, axis, block_ids, num_blocks))


def inject_kv_into_layer(
    layer: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    request_id: str,
    *,
    num_blocks: int | None = None,
) -> None:
    """Put what `extract_kv_from_layer` gave for as many blocks into the blocks `block_ids` of a layer, in place.

    Raises LayoutError, which names the request, where shapes or data types differ: nothing is cut, nothing converted.
    """
    axis = _block_axis(layer, num_blocks)
    rows = _rows(layer, axis, block_ids, num_blocks)
    wanted = (*layer.shape[:axis], len(rows), *layer.shape[axis + 1 :])
    if tuple(kv_cache.shape) != wanted or kv_cache.dtype != layer.dtype:
        raise LayoutError(
            f"KV of request {request_id!r}: {tuple(kv_cache.shape)} {kv_cache.dtype} came for blocks of {wanted} "
            f"{layer.dtype}; both engines need the same model, block size and layout"
        )
    layer.index_copy_(axis, rows, kv_cache.to(layer.device))


def _block_axis(layer: torch.Tensor, num_blocks: int | None) -> int:
    shape = tuple(layer.shape)
    if layer.ndim in (3, 4):
        return 0
    if layer.ndim == 5:
        first, second = (
            (shape[1] == 2 and _counts(shape[0], num_blocks)),
            (shape[0] == 2 and _counts(shape[1], num_blocks)),
        )
        if first != second:
            return 0 if first else 1
    raise LayoutError(
        f"a layer of shape {shape}: which axis counts its blocks is not known; expected [2, B, N, H, D], "
        "[B, 2, N, H, D], [B, H, N, 2D], [B, N, C] or [B, 1, N, C]"
    )


def _counts(size: int, num_blocks: int | None) -> bool:
    """Whether an axis of this size can be that of the blocks."""
    return num_blocks is None or (size > 0 and size % num_blocks == 0)


def _rows(layer: torch.Tensor, axis: int, block_ids: torch.Tensor, num_blocks: int | None) -> torch.Tensor:
    """The places of the blocks along their axis."""
    size = layer.shape[axis]
    blocks = size if num_blocks is None else num_blocks
    each, rest = divmod(size, blocks)
    if rest:
        raise LayoutError(f"{size} blocks of a layer do not make {blocks} of the engine's")
    ids = block_ids.to(device=layer.device, dtype=torch.int64)
    if ids.ndim != 1 or (len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= blocks)):
        raise BlockIdError(f"block ids of shape {tuple(ids.shape)}; expected a list of ids from 0 to {blocks - 1}")
    return (ids[:, None] * each + torch.arange(each, device=layer.device)).flatten()
