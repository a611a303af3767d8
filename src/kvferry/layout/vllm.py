"""vLLM's formats. Which one a tensor has, its shape says; the order in memory, its strides."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import LayoutError
from kvferry.layout.build import layout_of, named, size
from kvferry.layout.hints import NO_HINTS, LayoutHints, TensorView
from kvferry.layout.planes import KVLayout


def vllm_flash_attention(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A tensor `[2, NB, BS, NH, HS]` a layer, NHD or HND by its strides."""
    return layout_of("vllm_flash_attention", [named(view, "KBNHD") for view in views], views, hints)


def vllm_flashinfer(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A tensor `[NB, 2, BS, NH, HS]` a layer, NHD or HND by its strides."""
    return layout_of("vllm_flashinfer", [named(view, "BKNHD") for view in views], views, hints)


def vllm_packed(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A view `[NB, NH, BS, 2 * HS]` a layer, or one `[NL, NB, NH, BS, 2 * HS]` for all, in any order of strides."""
    axes = [named(view, "BHND", "LBHND") for view in views]
    return layout_of("vllm_packed", axes, views, hints, elements_per_dim=2)


def vllm_nvfp4(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A view `[NB, 2 * NH, BS, D]` of bytes a layer: keys and values of four bits, each head's scales beside them.

    `D` is the packed width, which is the layout's `head_dim`.
    """
    axes = [named(view, "BHND", "LBHND") for view in views]
    for view, layer in zip(views, axes, strict=True):
        if view.itemsize != 1 or size(layer, "H") % 2:
            raise LayoutError(f"{view}: a cache of four-bit elements has bytes, and keys and values of each head")
    return layout_of("vllm_nvfp4", axes, views, hints, heads_per_head=2)


def mla(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """A tensor `[NB, BS, D]` (or `[NB, 1, BS, D]`) a layer; the widths `D` of the layers may differ."""
    axes = [named(view, "BND", "BHND") for view in views]
    for layer in axes:
        if size(layer, "H") != 1:
            raise LayoutError(f"an MLA cache has one KV head; the tensor has {size(layer, 'H')}")
    return layout_of("mla", axes, views, hints)
