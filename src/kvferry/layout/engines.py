"""The formats in which engines keep their KV cache: one function each, which names the axes and checks the hints.

Axis names: B blocks, L layers, K key/value, N tokens in a block, H KV heads, D head elements, S kernel blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.planes import BLOCK_AXIS, Axis, KVLayout, Plane, derive_planes, merge_planes


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


_NO_HINTS = LayoutHints()


def vllm_flash_attention(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """A tensor `[2, NB, BS, NH, HS]` a layer, NHD or HND by its strides."""
    return _layout("vllm_flash_attention", [_named(view, "KBNHD") for view in views], views, hints)


def vllm_flashinfer(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """A tensor `[NB, 2, BS, NH, HS]` a layer, NHD or HND by its strides."""
    return _layout("vllm_flashinfer", [_named(view, "BKNHD") for view in views], views, hints)


def vllm_packed(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """A view `[NB, NH, BS, 2 * HS]` a layer, or one `[NL, NB, NH, BS, 2 * HS]` for all, in any order of strides."""
    return _layout("vllm_packed", [_named(view, "BHND", "LBHND") for view in views], views, hints)


def mla(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """A tensor `[NB, BS, D]` (or `[NB, 1, BS, D]`) a layer; the widths `D` of the layers may differ."""
    axes = [_named(view, "BND", "BHND") for view in views]
    for layer in axes:
        if _size(layer, "H") != 1:
            raise LayoutError(f"an MLA cache has one KV head; the tensor has {_size(layer, 'H')}")
    return _layout("mla", axes, views, hints)


def trtllm_pool(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """One pool `[NB, NL, kvFactor, NH * BS * HS]`; the hints say what its last axis holds."""
    if len(views) != 1:
        raise LayoutError(f"{len(views)} TensorRT-LLM pools; models with more than one pool are not supported")
    view = views[0]
    shape = trtllm_view_6d(view.shape, hints)
    last = view.stride[3]
    stride = (*view.stride[:3], shape[4] * shape[5] * last, shape[5] * last, last)
    names = "BLKHND" if hints.kv_layout == "HND" else "BLKNHD"
    axes = [Axis(*axis) for axis in zip(names, shape, stride, strict=True)]
    return _layout("trtllm_pool", [axes], views, hints)


def trtllm_view_6d(shape: Sequence[int], hints: LayoutHints) -> tuple[int, ...]:
    """`[NB, NL, kvFactor, NH * BS * HS]` as `[NB, NL, kvFactor, NH, BS, HS]` (HND) or `[..., BS, NH, HS]` (NHD)."""
    if len(shape) != 4 or shape[2] not in (1, 2):
        raise LayoutError(f"TensorRT-LLM pool of shape {tuple(shape)}; expected [NB, NL, 1 or 2, NH * BS * HS]")
    heads, tokens, dim = hints.num_kv_heads, hints.tokens_per_block, hints.head_dim
    if not (hints.kv_layout and heads and tokens and dim):
        raise LayoutError(f"{hints}: a TensorRT-LLM pool needs kv_layout, num_kv_heads, tokens_per_block and head_dim")
    if heads * tokens * dim != shape[3]:
        raise LayoutError(
            f"hints say {heads} heads * {tokens} tokens * {dim} elements = {heads * tokens * dim}; "
            f"the pool's last axis has {shape[3]}"
        )
    inner = (heads, tokens) if hints.kv_layout == "HND" else (tokens, heads)
    return (*shape[:3], *inner, dim)


def token_pool(views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS) -> KVLayout:
    """Pools `[slots, NH, HS]`, a K and a V (or one) a layer; a block is `tokens_per_block` slots (SGLang's page)."""
    page = hints.tokens_per_block
    if page < 1:
        raise LayoutError("a token pool needs the hint tokens_per_block (the engine's page size)")
    layers = []
    for view in views:
        slots, heads, dim = _named(view, "BHD")
        if slots.size % page:
            raise LayoutError(f"{slots.size} slots are no multiple of tokens_per_block, {page}")
        blocks = Axis(BLOCK_AXIS, slots.size // page, slots.stride * page)
        layers.append([blocks, Axis("N", page, slots.stride), heads, dim])
    return _layout("token_pool", layers, views, hints)


FORMATS: Mapping[str, Callable[[Sequence[TensorView], LayoutHints], KVLayout]] = MappingProxyType(
    {
        format_.__name__: format_
        for format_ in (vllm_flash_attention, vllm_flashinfer, vllm_packed, mla, trtllm_pool, token_pool)
    }
)


def describe(
    format: str, views: Sequence[TensorView], hints: LayoutHints = _NO_HINTS, *, names: Sequence[str] = ()
) -> KVLayout:
    """The layout of `views` (one a layer, in the order of the layers) in a format named as in `FORMATS`.

    `names` are those of the layers, one a view: KV is shared only with engines that give the same names in the same
    order. Without them the order alone tells the layers apart.
    """
    if format not in FORMATS:
        raise LayoutError(f"format {format!r} is not known; known formats: {', '.join(FORMATS)}")
    layout = FORMATS[format](views, hints)
    if not names:
        return layout
    if len(names) != len(views):
        raise LayoutError(f"{len(names)} names for {len(views)} tensors; give one a tensor")
    shared: dict[TensorView, list[str]] = {}
    for view, name in zip(views, names, strict=True):
        shared.setdefault(view, []).append(name)
    return msgspec.structs.replace(layout, layer_names=tuple(map(tuple, shared.values())))


def _layout(format: str, layers: Sequence[Sequence[Axis]], views: Sequence[TensorView], hints: LayoutHints) -> KVLayout:
    """What all formats share: `layers` are the named axes of `views`. Views that are the same tensor count once."""
    if not views:
        raise LayoutError("no tensors; a KV cache has at least one layer")
    distinct = {view: list(axes) for view, axes in zip(views, layers, strict=True)}
    grouped = [_group_kernel_blocks(axes, hints) for axes in distinct.values()]
    planes: list[Plane] = []
    orders = []
    for view, axes in zip(distinct, grouped, strict=True):
        offset = view.storage_offset * view.itemsize
        found, order = derive_planes(axes, storage=view.storage, offset=offset, itemsize=view.itemsize)
        planes += found
        orders.append(order)
    layout = KVLayout(
        format=format,
        block_size=_same("tokens in a block", [_size(axes, "N") * _size(axes, "S") for axes in grouped]),
        num_blocks=_same("blocks", [_size(axes, BLOCK_AXIS) for axes in grouped]),
        dtype=_joined([view.dtype for view in distinct]),
        num_layers=sum(_size(axes, "L") for axes in grouped),
        num_kv_heads=_common([_size(axes, "H") for axes in grouped]),
        head_dim=_common([_size(axes, "D") for axes in grouped]) // (2 if format == "vllm_packed" else 1),
        planes=merge_planes(planes),
        axis_order=_joined(orders),
        isa=hints.isa,
    )
    _check_hints(layout, hints, num_views=len(views))
    return layout


def _named(view: TensorView, *names: str) -> list[Axis]:
    """The view's axes under those of `names` that have as many; a K axis must hold keys and values."""
    for candidate in names:
        if len(candidate) == len(view.shape):
            axes = [Axis(*axis) for axis in zip(candidate, view.shape, view.stride, strict=True)]
            if "K" in candidate and _size(axes, "K") != 2:
                raise LayoutError(f"shape {view.shape}: axis {candidate.index('K')} must be 2 (keys and values)")
            return axes
    raise LayoutError(f"shape {view.shape}; expected axes {' or '.join('[' + ', '.join(name) + ']' for name in names)}")


def _group_kernel_blocks(axes: list[Axis], hints: LayoutHints) -> list[Axis]:
    """Split the block axis where the hints say that `S` of the tensor's blocks make one block of the engine."""
    at = next(index for index, axis in enumerate(axes) if axis.name == BLOCK_AXIS)
    blocks = axes[at]
    if not hints.num_blocks or blocks.size == hints.num_blocks:
        return axes
    ratio, rest = divmod(blocks.size, hints.num_blocks)
    if rest or not ratio or hints.tokens_per_block != ratio * _size(axes, "N"):
        raise LayoutError(
            f"hints say {hints.num_blocks} blocks of {hints.tokens_per_block} tokens; "
            f"the tensor has {blocks.size} of {_size(axes, 'N')}"
        )
    pair = [Axis(BLOCK_AXIS, hints.num_blocks, blocks.stride * ratio), Axis("S", ratio, blocks.stride)]
    return [*axes[:at], *pair, *axes[at + 1 :]]


def _check_hints(layout: KVLayout, hints: LayoutHints, *, num_views: int) -> None:
    said = {
        "tokens_per_block": (hints.tokens_per_block, (layout.block_size,)),
        "num_blocks": (hints.num_blocks, (layout.num_blocks,)),
        "num_layers": (hints.num_layers, (layout.num_layers, num_views, *_pairs(layout))),
        "num_kv_heads": (hints.num_kv_heads, (layout.num_kv_heads,)),
        "head_dim": (hints.head_dim, (layout.head_dim,)),
        "dtype": (hints.dtype, (layout.dtype,)),
    }
    for name, (hint, found) in said.items():
        if hint and hint not in found:
            raise LayoutError(f"hints say {name} = {hint}; the tensors say {found[0]}")
    order = layout.axis_order
    if hints.kv_layout and "N" in order and "H" in order and "," not in order:
        found_order = "NHD" if order.index("N") < order.index("H") else "HND"
        if found_order != hints.kv_layout:
            raise LayoutError(f"hints say kv_layout = {hints.kv_layout}; the strides say {found_order}")


def _pairs(layout: KVLayout) -> tuple[int, ...]:
    """A token pool may come as a K and a V a layer."""
    return (layout.num_layers // 2,) if layout.format == "token_pool" and layout.num_layers % 2 == 0 else ()


def _size(axes: Sequence[Axis], name: str) -> int:
    return next((axis.size for axis in axes if axis.name == name), 1)


def _same(what: str, values: Sequence[int]) -> int:
    if len(set(values)) > 1:
        raise LayoutError(f"layers with {' and '.join(map(str, sorted(set(values))))} {what}; all must have the same")
    return values[0]


def _common(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 0


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ",".join(values)
