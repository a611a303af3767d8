"""SGLang's formats: token pools on the device, and pages as its host pools lay them out."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import LayoutError
from kvferry.layout.build import layout_of, named
from kvferry.layout.hints import NO_HINTS, LayoutHints, TensorView
from kvferry.layout.planes import BLOCK_AXIS, Axis, KVLayout


def token_pool(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """Pools `[slots, NH, HS]`, a K and a V (or one) a layer; a block is `tokens_per_block` slots (SGLang's page)."""
    page = hints.tokens_per_block
    if page < 1:
        raise LayoutError("a token pool needs the hint tokens_per_block (the engine's page size)")
    layers = []
    for view in views:
        slots, heads, dim = named(view, "BHD")
        if slots.size % page:
            raise LayoutError(f"{slots.size} slots are no multiple of tokens_per_block, {page}")
        blocks = Axis(BLOCK_AXIS, slots.size // page, slots.stride * page)
        layers.append([blocks, Axis("N", page, slots.stride), heads, dim])
    return layout_of("token_pool", layers, views, hints)


def sglang_layer_first(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """Pages `[pages, NL, 2, BS, NH, HS]`, or `[pages, NL, BS, NH, HS]` where there is one of K and V."""
    return _pages("sglang_layer_first", ("BLKNHD", "BLNHD"), views, hints)


def sglang_page_first(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """Pages `[pages, 2, BS, NL, NH, HS]`, or `[pages, BS, NL, NH, HS]`."""
    return _pages("sglang_page_first", ("BKNLHD", "BNLHD"), views, hints)


def sglang_page_first_direct(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """Pages `[pages, 2, NL, BS, NH, HS]`, or `[pages, NL, BS, NH, HS]`."""
    return _pages("sglang_page_first_direct", ("BKLNHD", "BLNHD"), views, hints)


def sglang_page_head(views: Sequence[TensorView], hints: LayoutHints = NO_HINTS) -> KVLayout:
    """Pages `[pages, 2, NH, BS, NL, HS]`."""
    return _pages("sglang_page_head", ("BKHNLD",), views, hints)


def _pages(format: str, names: Sequence[str], views: Sequence[TensorView], hints: LayoutHints) -> KVLayout:
    return layout_of(format, [named(view, *names) for view in views], views, hints)
