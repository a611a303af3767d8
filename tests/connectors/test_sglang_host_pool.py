"""SGLang's host pools as pages: in place, in every layout; what is not known is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from connectors.sglang_doubles import LAYOUTS, PAGE, host_pool, indices, token
from kvferry.connectors.sglang.host_pool import host_pages
from kvferry.connectors.sglang.staging import numbers_of_pages
from kvferry.errors import LayoutError
from kvferry.layout import KVLayout, LayoutHints, describe, view_tensors


def registered(layout: str, *, shared: bool = False) -> KVLayout:
    pages = host_pages(host_pool(layout, shared=shared), shared=shared)
    dense = pages.view.contiguous()
    return describe(pages.format, view_tensors([dense])[0], LayoutHints.from_mapping(pages.hints()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_its_tokens_and_no_others(layout: str, shared: bool) -> None:
    pool = host_pool(layout, shared=shared)
    pages = host_pages(pool, shared=shared)
    assert len(pages.view) == 12
    assert pages.view.untyped_storage().data_ptr() == pool.kv_buffer.untyped_storage().data_ptr()
    wanted = torch.cat([token(pool, 3 * PAGE + place, shared=shared).flatten() for place in range(PAGE)])
    assert pages.view[3].flatten().sort().values.equal(wanted.sort().values)
    assert pages.page_bytes == wanted.numel() * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_moved_is_the_same_tokens_elsewhere(layout: str) -> None:
    pool = host_pool(layout)
    pages = host_pages(pool, shared=False)
    wanted = [token(pool, 2 * PAGE + place) for place in range(PAGE)]
    pages.view[7].copy_(pages.view[2].contiguous())
    for place in range(PAGE):
        assert token(pool, 7 * PAGE + place).equal(wanted[place])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_registered_as_one_run_each(layout: str) -> None:
    found = registered(layout)
    assert [plane.length for plane in found.planes] == [found.block_bytes]
    assert (found.block_size, found.num_layers, found.num_kv_heads, found.head_dim) == (PAGE, 3, 2, 8)


def test_no_two_layouts_take_each_others_pages() -> None:
    plain = [registered(layout).fingerprint() for layout in LAYOUTS]
    latent = [registered(layout, shared=True).fingerprint() for layout in LAYOUTS[:3]]
    assert len({*plain, *latent}) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_buffer": [torch.zeros(4)]}, "is not, or not only, one tensor"),
        ({"kv_buffer": None}, "is not, or not only, one tensor"),
        ({"kind": "MHATokenToKVPoolMXFP8Host", "k_scale_host": torch.zeros(3)}, "MXFP8Host that is not, or not only"),
        ({"layout": "page_unified"}, "set --hicache-mem-layout to one of: layer_first"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"layer_num": 4}, "what lies where is not known"),
        ({"head_dim": 16}, "what lies where is not known"),
        ({"page_size": 5}, "what lies where is not known"),
        ({"kv_buffer": torch.zeros(48, 3, 2, 8)}, "what lies where is not known"),
    ],
)
def test_unknown_pools_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        host_pages(host_pool("page_first", **change), shared=False)


def test_token_indices_are_pages() -> None:
    assert numbers_of_pages(indices(3, 0, 7), PAGE) == [3, 0, 7]
    assert numbers_of_pages(torch.tensor([], dtype=torch.int64), PAGE) == []
    for wrong in ([0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2]):
        with pytest.raises(ValueError, match="pages"):
            numbers_of_pages(torch.tensor(wrong), PAGE)
