"""SGLang's host pool as pages: one view whose first axis counts them, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kvferry.errors import LayoutError

# By name: a subclass may keep more than its tensor shows (scales of MXFP8, an indexer's keys).
_KINDS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
# Of each layout: the axes of the pool's tensor with K and V (MLA's is the same without K), and those of its pages, as
# the format of that name in kvferry.layout has them. T tokens, P pages, N tokens of a page.
_LAYOUTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "layer_first": ("KLTHD", "PLKNHD"),
        "page_first": ("KTLHD", "PKNLHD"),
        "page_first_direct": ("KPLNHD", "PKLNHD"),
        "page_head": ("KPHNLD", "PKHNLD"),
    }
)


@dataclass(frozen=True, eq=False)
class HostPages:
    """`view[p]` is page `p` of the pool, in the pool's own memory. `format` is its name in `kvferry.layout.FORMATS`."""

    view: torch.Tensor
    format: str
    page_tokens: int
    layers: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.view[0].numel() * self.view.element_size()

    def hints(self) -> dict[str, Any]:
        """What is registered beside the tensors."""
        return {"tokens_per_block": self.page_tokens}


def host_pages(pool: Any, *, shared: bool) -> HostPages:
    """The pages of a host pool; `shared` where SGLang says that it holds latents (MLA).

    Raises LayoutError for a pool that holds more than its tensor shows, or lays it out in a way that is not known.
    """
    kind, layout = type(pool).__name__, str(getattr(pool, "layout", ""))
    buffer = getattr(pool, "kv_buffer", None)
    if kind not in _KINDS or not isinstance(buffer, torch.Tensor):
        raise LayoutError(
            f"SGLang's host pool is a {kind} that is not, or not only, one tensor: KVferry keeps plain keys and "
            f"values, or latents, of {' and '.join(_KINDS)}. Start the engine without a HiCache storage back end"
        )
    if layout not in _LAYOUTS:
        raise LayoutError(
            f"SGLang's host pool {kind} has the layout {layout!r}; set --hicache-mem-layout to one of: "
            f"{', '.join(_LAYOUTS)}"
        )
    if getattr(pool, "dcp_size", 1) > 1:
        raise LayoutError("decode context parallelism is on: each rank has other tokens of a page; not supported")
    axes, page_axes = _LAYOUTS[layout]
    if shared:
        axes, page_axes = axes.replace("K", ""), page_axes.replace("K", "")
    page = int(pool.page_size)
    sizes = _sizes(pool, axes, tuple(buffer.shape), page)
    named = buffer
    if "T" in axes:
        place = axes.index("T")
        named = buffer.view(*buffer.shape[:place], sizes["P"], page, *buffer.shape[place + 1 :])
        axes = axes.replace("T", "PN")
    view = named.permute([axes.index(axis) for axis in page_axes])
    layers = f"{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)} of {sizes['L']}"
    return HostPages(view, f"sglang_{layout}", page, layers)


def _sizes(pool: Any, axes: str, shape: tuple[int, ...], page: int) -> dict[str, int]:
    """The size of each axis. Raises LayoutError where the tensor is not what the pool says of itself."""
    said = {"K": 2, "L": int(pool.layer_num), "N": page}
    if hasattr(pool, "head_num"):
        said |= {"H": int(pool.head_num), "D": int(pool.head_dim)}
    found = dict(zip(axes, shape, strict=False))
    if "T" in found:
        found["P"], rest = divmod(found["T"], page)
    else:
        rest = 0
    if len(shape) != len(axes) or rest or any(found.get(axis, size) != size for axis, size in said.items()):
        raise LayoutError(
            f"SGLang's host pool {type(pool).__name__} has a tensor of shape {shape} in the layout {pool.layout!r} for "
            f"{said}; what lies where is not known"
        )
    return found
