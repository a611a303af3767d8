"""The engine formats: real torch shapes and strides give the right planes; contradictions are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout import FORMATS, KVLayout, LayoutHints, Plane, TensorView, describe, trtllm_view_6d

NB, BS, NH, HS = 10, 16, 8, 64


def view(tensor: torch.Tensor, storage: int = 0) -> TensorView:
    return TensorView(
        storage,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.element_size(),
        str(tensor.dtype).removeprefix("torch."),
    )


def ids_of(layout: KVLayout, storage: torch.Tensor, block: int) -> torch.Tensor:
    """The elements of one block, in the order of the planes; `storage` is flat and of 4-byte elements."""
    parts = []
    for plane in layout.planes:
        start = plane.offset + block * plane.stride
        parts.append(storage[start // 4 : (start + plane.length) // 4])
    return torch.cat(parts)


def check_bytes(layout: KVLayout, tensors: Sequence[torch.Tensor], block_axis: int) -> None:
    """Each block's planes hold the elements that the tensors have at that block, and no others."""
    whole = tensors[0].untyped_storage()
    storage = torch.tensor([], dtype=torch.int32).set_(whole)
    for block in range(layout.num_blocks):
        wanted = torch.cat([tensor.select(block_axis, block).reshape(-1) for tensor in tensors])
        assert ids_of(layout, storage, block).sort().values.equal(wanted.sort().values)
    layout.validate([whole.nbytes()])


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


def test_flash_attention_nhd_and_hnd() -> None:
    nhd = numbered(2, NB, BS, NH, HS)
    layout = describe("vllm_flash_attention", [view(nhd)])
    page = BS * NH * HS * 4
    assert layout.planes == (Plane(0, 0, page, page), Plane(0, NB * page, page, page))
    assert (layout.block_size, layout.num_blocks, layout.num_kv_heads, layout.head_dim) == (BS, NB, NH, HS)
    check_bytes(layout, [nhd], 1)
    hnd = numbered(2, NB, NH, BS, HS).transpose(2, 3)
    other = describe("vllm_flash_attention", [view(hnd)], LayoutHints(kv_layout="HND"))
    assert other.planes == layout.planes
    assert other.fingerprint() != layout.fingerprint()
    check_bytes(other, [hnd], 1)


def test_flashinfer_blocks_are_one_run() -> None:
    cache = numbered(NB, 2, BS, NH, HS)
    layout = describe("vllm_flashinfer", [view(cache)], LayoutHints(kv_layout="NHD", num_kv_heads=NH, head_dim=HS))
    assert len(layout.planes) == 1
    check_bytes(layout, [cache], 0)


# The six orders in which one allocation holds layers, blocks, heads, tokens and content.
@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_packed_in_every_order(order: str) -> None:
    sizes = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 6}
    memory = numbered(*(sizes[name] for name in order))
    logical = memory.permute(*(order.index(name) for name in "LBHNC"))
    layers = [logical[layer] for layer in range(3)]
    layout = describe("vllm_packed", [view(layer) for layer in layers])
    assert (layout.num_layers, layout.num_blocks, layout.block_size, layout.head_dim) == (3, 5, 4, 3)
    check_bytes(layout, layers, 0)
    assert len(layout.planes) == {"LBNHC": 3, "LBHNC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 6}[order]
    together = describe("vllm_packed", [view(logical)], LayoutHints(num_layers=3))
    assert together.num_layers == 3
    check_bytes(together, [logical], 1)


def test_padded_strides_and_interior_offsets() -> None:
    padded = numbered(4, NB, 2, 4, 12)[:, :, :, :, :8]
    layers = [padded[layer] for layer in range(1, 4)]
    layout = describe("vllm_packed", [view(layer) for layer in layers])
    check_bytes(layout, layers, 0)
    assert all(plane.length == 8 * 4 for plane in layout.planes)


def test_mla_of_mixed_widths() -> None:
    storage = torch.zeros(NB * 64 * (576 + 132) * 2, dtype=torch.int8)
    wide = storage[: NB * 64 * 576 * 2].view(torch.bfloat16).view(NB, 64, 576)
    narrow = storage[NB * 64 * 576 * 2 :][: NB * 64 * 132].view(torch.uint8).view(NB, 1, 64, 132)
    layout = describe("mla", [view(wide), view(narrow)])
    assert [plane.length for plane in layout.planes] == [64 * 576 * 2, 64 * 132]
    assert (layout.dtype, layout.head_dim, layout.num_kv_heads) == ("bfloat16,uint8", 0, 1)
    layout.validate([storage.nbytes])
    assert describe("mla", [view(narrow), view(wide)]).fingerprint() != layout.fingerprint()


def test_widths_in_another_order_differ_even_where_blocks_are_one_run() -> None:
    memory = numbered(NB, 10)
    first = [memory[:, :6].view(NB, 1, 6), memory[:, 6:].view(NB, 1, 4)]
    second = [memory[:, :4].view(NB, 1, 4), memory[:, 4:].view(NB, 1, 6)]
    one, two = (describe("mla", [view(layer) for layer in layers]) for layers in (first, second))
    assert one.planes == two.planes
    assert one.fingerprint() != two.fingerprint()


def test_layers_that_share_a_tensor_count_once() -> None:
    caches = [numbered(2, NB, BS, NH, HS) for _ in range(2)]
    views = [view(caches[0], 0), view(caches[1], 1), view(caches[0], 0)]
    layout = describe("vllm_flash_attention", views, LayoutHints(num_layers=3))
    assert layout.num_layers == 2
    assert len(layout.planes) == 4


def test_trtllm_pool() -> None:
    hints = LayoutHints(kv_layout="HND", num_kv_heads=NH, tokens_per_block=BS, head_dim=HS, num_layers=4)
    pool = numbered(NB, 4, 2, NH * BS * HS)
    layout = describe("trtllm_pool", [view(pool)], hints)
    assert trtllm_view_6d(pool.shape, hints) == (NB, 4, 2, NH, BS, HS)
    assert len(layout.planes) == 1
    check_bytes(layout, [pool], 0)
    nhd = msgspec.structs.replace(hints, kv_layout="NHD")
    assert trtllm_view_6d(pool.shape, nhd) == (NB, 4, 2, BS, NH, HS)
    assert describe("trtllm_pool", [view(pool)], nhd).fingerprint() != layout.fingerprint()


def test_token_pool_pages() -> None:
    pools = [numbered(NB * 8, NH, HS) for _ in range(2)]
    views = [view(pool, index) for index, pool in enumerate(pools)]
    layout = describe("token_pool", views, LayoutHints(tokens_per_block=8, num_layers=1))
    assert (layout.num_blocks, layout.block_size) == (NB, 8)
    assert layout.planes[0] == Plane(0, 0, 8 * NH * HS * 4, 8 * NH * HS * 4)


def test_kernel_blocks_are_grouped() -> None:
    cache = numbered(2, NB * 4, BS, NH, HS)
    layout = describe("vllm_flash_attention", [view(cache)], LayoutHints(num_blocks=NB, tokens_per_block=4 * BS))
    assert (layout.num_blocks, layout.block_size) == (NB, 4 * BS)
    assert layout.planes[0] == Plane(0, 0, 4 * BS * NH * HS * 4, 4 * BS * NH * HS * 4)
    assert layout.fingerprint() != describe("vllm_flash_attention", [view(cache)]).fingerprint()


def test_fingerprint_is_of_meaning_not_of_place() -> None:
    small, large = numbered(2, 3, BS, NH, HS), numbered(2, NB, BS, NH, HS)
    one = describe("vllm_flash_attention", [view(small)])
    assert describe("vllm_flash_attention", [view(large, 2)]).fingerprint() == one.fingerprint()
    # Version 2: since the names of layers are part of it, caches of version 1 may have them swapped and must not match.
    assert one.fingerprint().hex() == "c244586fd304eee2000f958f523f9656efe3c5ac4d6289887b6e296e52fff3cb"
    for field, value in {"format": "other", "dtype": "float32", "block_size": 32, "head_dim": 32, "isa": "amx"}.items():
        changed: KVLayout = msgspec.structs.replace(one, **{field: value})
        assert changed.fingerprint() != one.fingerprint(), field


def test_round_trip_through_msgpack() -> None:
    layout = describe("vllm_flash_attention", [view(numbered(2, NB, BS, NH, HS))])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout


POOL = LayoutHints(kv_layout="HND", num_kv_heads=2, tokens_per_block=4, head_dim=8)


@pytest.mark.parametrize(
    ("format", "shape", "hints", "text"),
    [
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(tokens_per_block=32), "= 32; the tensors say 64"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(num_kv_heads=4), "= 4; the tensors say 8"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(head_dim=128), "= 128; the tensors say 64"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(num_layers=2), "= 2; the tensors say 1"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(dtype="bfloat16"), "bfloat16; the tensors say int32"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(kv_layout="HND"), "= HND; the strides say NHD"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(num_blocks=7), "say 7 blocks of 0 tokens"),
        ("vllm_flash_attention", (2, NB, 64, NH, HS), LayoutHints(num_blocks=5), "say 5 blocks of 0 tokens"),
        ("vllm_flash_attention", (NB, 3, 64, NH, HS), LayoutHints(), "axis 0 must be 2"),
        ("vllm_flash_attention", (NB, 64, NH), LayoutHints(), r"expected axes \[K, B, N, H, D\]"),
        ("vllm_flashinfer", (2, NB, 64, NH, HS), LayoutHints(), "axis 1 must be 2"),
        ("mla", (NB, 2, 64, 576), LayoutHints(), "one KV head; the tensor has 2"),
        ("trtllm_pool", (NB, 4, 2, 2 * 4 * 8 + 1), POOL, "= 64; the pool's last axis has 65"),
        ("trtllm_pool", (NB, 4, 3, 64), POOL, r"expected \[NB, NL, 1 or 2"),
        ("trtllm_pool", (NB, 4, 2, 64), LayoutHints(), "needs kv_layout"),
        ("trtllm_pool", (NB, 4, 2, 64), msgspec.structs.replace(POOL, num_layers=8), "= 8; the tensors say 4"),
        ("token_pool", (NB, NH, HS), LayoutHints(), "needs the hint tokens_per_block"),
        ("token_pool", (NB, NH, HS), LayoutHints(tokens_per_block=3), "10 slots are no multiple"),
        ("nonsense", (NB,), LayoutHints(), "known formats: vllm_flash_attention"),
    ],
)
def test_contradictions_name_both_values(format: str, shape: tuple[int, ...], hints: LayoutHints, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        describe(format, [view(numbered(*shape))], hints)


def test_layers_that_do_not_fit_together() -> None:
    with pytest.raises(LayoutError, match="4 and 8 tokens in a block"):
        describe("mla", [view(numbered(NB, 8, 2)), view(numbered(NB, 4, 2))])
    with pytest.raises(LayoutError, match="8 and 10 blocks"):
        describe("mla", [view(numbered(10, 8, 2)), view(numbered(8, 8, 2))])
    with pytest.raises(LayoutError, match="no tensors"):
        describe("mla", [])
    with pytest.raises(LayoutError, match="2 TensorRT-LLM pools"):
        describe("trtllm_pool", [view(numbered(NB, 4, 2, 64)), view(numbered(NB, 2, 2, 64))], POOL)


def test_overlapping_layers_are_found() -> None:
    flat = numbered(NB * 64)
    layers = [flat[: 8 * 64].view(8, 4, 16), flat[64 : 9 * 64].view(8, 4, 16)]
    with pytest.raises(LayoutError, match="overlap"):
        describe("mla", [view(layer) for layer in layers]).validate([flat.nbytes])


def test_hints_from_an_engines_dictionary() -> None:
    assert LayoutHints.from_mapping(None) == LayoutHints()
    assert LayoutHints.from_mapping({"kv_layout": "HND", "head_dim": 64}).head_dim == 64
    for wrong in ({"kv_layuot": "HND"}, {"head_dim": "64"}, {"kv_layout": "XYZ"}, {"head_dim": -1}):
        with pytest.raises(LayoutError):
            LayoutHints.from_mapping(wrong)


def test_registry_is_closed() -> None:
    assert list(FORMATS) == [
        "vllm_flash_attention",
        "vllm_flashinfer",
        "vllm_packed",
        "vllm_nvfp4",
        "mla",
        "trtllm_pool",
        "trtllm_regions",
        "token_pool",
        "sglang_layer_first",
        "sglang_page_first",
        "sglang_page_first_direct",
        "sglang_page_head",
    ]
