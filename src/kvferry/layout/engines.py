"""The formats in which engines keep their KV cache: one function each, which names the axes and checks the hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.hints import NO_HINTS, LayoutHints, TensorView
from kvferry.layout.planes import KVLayout
from kvferry.layout.sglang import (
    sglang_layer_first,
    sglang_page_first,
    sglang_page_first_direct,
    sglang_page_head,
    token_pool,
)
from kvferry.layout.trtllm import trtllm_pool, trtllm_regions
from kvferry.layout.vllm import mla, vllm_flash_attention, vllm_flashinfer, vllm_nvfp4, vllm_packed

FORMATS: Mapping[str, Callable[[Sequence[TensorView], LayoutHints], KVLayout]] = MappingProxyType(
    {
        format_.__name__: format_
        for format_ in (
            vllm_flash_attention,
            vllm_flashinfer,
            vllm_packed,
            vllm_nvfp4,
            mla,
            trtllm_pool,
            trtllm_regions,
            token_pool,
            sglang_layer_first,
            sglang_page_first,
            sglang_page_first_direct,
            sglang_page_head,
        )
    }
)


def describe(
    format: str, views: Sequence[TensorView], hints: LayoutHints = NO_HINTS, *, names: Sequence[str] = ()
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
