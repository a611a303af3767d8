"""TensorRT-LLM's formats: one pool for all layers, or regions of page slots. The engine says what their bytes are."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import LayoutError
from kvferry.layout.build import check_hints, layout_of
from kvferry.layout.hints import NO_HINTS, LayoutHints, TensorView
from kvferry.layout.planes import BLOCK_AXIS, Axis, KVLayout, Plane, derive_planes, merge_planes


def trtllm_pool(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """One pool `[NB, NL, kvFactor, NH * BS * HS]`; the hints say what its last axis holds."""
    if len(views) != 1:
        raise LayoutError(f"{len(views)} TensorRT-LLM pools; models with more than one pool are not supported")
    view = views[0]
    shape = trtllm_view_6d(view.shape, hints)
    last = view.stride[3]
    stride = (*view.stride[:3], shape[4] * shape[5] * last, shape[5] * last, last)
    names = "BLKHND" if hints.kv_layout == "HND" else "BLKNHD"
    axes = [Axis(*axis) for axis in zip(names, shape, stride, strict=True)]
    return layout_of("trtllm_pool", [axes], views, hints)


def trtllm_view_6d(shape: Sequence[int], hints: LayoutHints) -> tuple[int, ...]:
    """`[NB, NL, kvFactor, NH * BS * HS]` as `[NB, NL, kvFactor, NH, BS, HS]` (HND) or `[..., BS, NH, HS]` (NHD)."""
    if len(shape) != 4 or shape[2] not in (1, 2):
        raise LayoutError(f"TensorRT-LLM pool of shape {tuple(shape)}; expected [NB, NL, 1 or 2, NH * BS * HS]")
    heads, tokens, dim = _inner(hints)
    if heads * tokens * dim != shape[3]:
        raise LayoutError(
            f"hints say {heads} heads * {tokens} tokens * {dim} elements = {heads * tokens * dim}; "
            f"the pool's last axis has {shape[3]}"
        )
    inner = (heads, tokens) if hints.kv_layout == "HND" else (tokens, heads)
    return (*shape[:3], *inner, dim)


def trtllm_regions(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A view `[NB, elements]` a region: what one run of a page slot's buffers holds, in all slots.

    The hints, `num_layers` among them, have to account for every element of a slot.
    """
    heads, tokens, dim = _inner(hints)
    a_layer = heads * tokens * dim
    for view in views:
        if len(view.shape) != 2:
            raise LayoutError(f"a region of shape {view.shape}; expected [slots, elements of one slot]")
    widths = [view.shape[1] for view in views]
    factor, rest = divmod(sum(widths), max(1, hints.num_layers) * a_layer)
    if not hints.num_layers or rest or factor not in (1, 2):
        raise LayoutError(
            f"hints say {hints.num_layers} layers of {heads} heads * {tokens} tokens * {dim} elements, keys and values "
            f"or one of them; the regions have {sum(widths)} elements a slot"
        )
    slots, dtypes = {view.shape[0] for view in views}, {view.dtype for view in views}
    if len(slots) > 1 or len(dtypes) > 1:
        raise LayoutError(f"regions of {sorted(slots)} slots and {sorted(dtypes)}; all must have the same")
    planes: list[Plane] = []
    for view in views:
        axes = [Axis(name, *axis) for name, *axis in zip((BLOCK_AXIS, "D"), view.shape, view.stride, strict=True)]
        offset = view.storage_offset * view.itemsize
        planes += derive_planes(axes, storage=view.storage, offset=offset, itemsize=view.itemsize)[0]
    order = f"H{heads}N{tokens}" if hints.kv_layout == "HND" else f"N{tokens}H{heads}"
    layout = KVLayout(
        format="trtllm_regions",
        block_size=tokens,
        num_blocks=slots.pop(),
        dtype=dtypes.pop(),
        num_layers=hints.num_layers,
        num_kv_heads=heads,
        head_dim=dim,
        planes=merge_planes(planes),
        axis_order=f"K{factor}{order}D{dim}:{','.join(map(str, widths))}",
        isa=hints.isa,
    )
    check_hints(layout, hints, num_views=len(views))
    return layout


def _inner(hints: LayoutHints) -> tuple[int, int, int]:
    """KV heads, tokens in a block, elements of a head."""
    heads, tokens, dim = hints.num_kv_heads, hints.tokens_per_block, hints.head_dim
    if not (hints.kv_layout and heads and tokens and dim):
        raise LayoutError(f"{hints}: a TensorRT-LLM pool needs kv_layout, num_kv_heads, tokens_per_block and head_dim")
    return heads, tokens, dim
