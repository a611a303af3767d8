"""From the named axes of an engine's tensors to a layout: what all formats share, and the check of the hints.

Axis names: B blocks, L layers, K key/value, N tokens in a block, H KV heads, D head elements, S kernel blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import LayoutError
from kvferry.layout.hints import LayoutHints, TensorView
from kvferry.layout.planes import BLOCK_AXIS, Axis, KVLayout, Plane, derive_planes, merge_planes


def layout_of(
    format: str,
    layers: Sequence[Sequence[Axis]],
    views: Sequence[TensorView],
    hints: LayoutHints,
    *,
    elements_per_dim: int = 1,
    heads_per_head: int = 1,
) -> KVLayout:
    """What all formats share: `layers` are the named axes of `views`. Views that are the same tensor count once.

    Where keys and values lie side by side on an axis, `elements_per_dim` elements of D make one of the head's, or
    `heads_per_head` of H one head.
    """
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
        block_size=_same("tokens in a block", [size(axes, "N") * size(axes, "S") for axes in grouped]),
        num_blocks=_same("blocks", [size(axes, BLOCK_AXIS) for axes in grouped]),
        dtype=_joined([view.dtype for view in distinct]),
        num_layers=sum(size(axes, "L") for axes in grouped),
        num_kv_heads=_common([size(axes, "H") for axes in grouped]) // heads_per_head,
        head_dim=_common([size(axes, "D") for axes in grouped]) // elements_per_dim,
        planes=merge_planes(planes),
        axis_order=_joined(orders),
        isa=hints.isa,
    )
    check_hints(layout, hints, num_views=len(views))
    return layout


def named(view: TensorView, *names: str) -> list[Axis]:
    """The view's axes under those of `names` that have as many; a K axis must hold keys and values."""
    for candidate in names:
        if len(candidate) == len(view.shape):
            axes = [Axis(*axis) for axis in zip(candidate, view.shape, view.stride, strict=True)]
            if "K" in candidate and size(axes, "K") != 2:
                raise LayoutError(f"shape {view.shape}: axis {candidate.index('K')} must be 2 (keys and values)")
            return axes
    expected = " or ".join("[" + ", ".join(name) + "]" for name in names)
    letters = "K: keys and values, B: blocks, N: tokens, H: heads, D: width, L: layers"
    raise LayoutError(f"shape {view.shape}; expected axes {expected} ({letters})")


def _group_kernel_blocks(axes: list[Axis], hints: LayoutHints) -> list[Axis]:
    """Split the block axis where the hints say that `S` of the tensor's blocks make one block of the engine."""
    at = next(index for index, axis in enumerate(axes) if axis.name == BLOCK_AXIS)
    blocks = axes[at]
    if not hints.num_blocks or blocks.size == hints.num_blocks:
        return axes
    ratio, rest = divmod(blocks.size, hints.num_blocks)
    if rest or not ratio or hints.tokens_per_block != ratio * size(axes, "N"):
        raise LayoutError(
            f"hints say {hints.num_blocks} blocks of {hints.tokens_per_block} tokens; "
            f"the tensor has {blocks.size} of {size(axes, 'N')}"
        )
    pair = [Axis(BLOCK_AXIS, hints.num_blocks, blocks.stride * ratio), Axis("S", ratio, blocks.stride)]
    return [*axes[:at], *pair, *axes[at + 1 :]]


def check_hints(layout: KVLayout, hints: LayoutHints, *, num_views: int) -> None:
    """Raise LayoutError where the hints say something else than the tensors."""
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


def size(axes: Sequence[Axis], name: str) -> int:
    """The size of the axis of that name; 1 where there is none."""
    return next((axis.size for axis in axes if axis.name == name), 1)


def _same(what: str, values: Sequence[int]) -> int:
    if len(set(values)) > 1:
        raise LayoutError(f"layers with {' and '.join(map(str, sorted(set(values))))} {what}; all must have the same")
    return values[0]


def _common(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 0


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ",".join(values)
