"""Random blocks of every format go through flat chunks into another cache of it, and are the same bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.copy.oracle import Bytes, gather, scatter
from kvferry.errors import LayoutError
from kvferry.ipc.flat import storage_bytes
from kvferry.layout import FORMATS, KVLayout, LayoutHints, describe, view_tensors

UNTOUCHED = 0xEE
NO_HINTS = LayoutHints()
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class Sizes:
    """Axes of a cache, but for its blocks."""

    layers: int
    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype
    padding: int
    shared: bool


@dataclass(frozen=True)
class Cache:
    """Tensors of one engine, with the axis that counts blocks in each, and what its configuration says."""

    format: str
    tensors: list[torch.Tensor]
    block_axes: list[int]
    hints: LayoutHints = NO_HINTS

    def layout(self) -> KVLayout:
        views, owners = view_tensors(self.tensors)
        layout = describe(self.format, views, self.hints)
        layout.validate([owner.untyped_storage().nbytes() for owner in owners])
        return layout

    def storages(self) -> list[Bytes]:
        return [storage_bytes(owner).numpy() for owner in view_tensors(self.tensors)[1]]

    def block(self, number: int) -> list[bytes]:
        """What the engine sees of one block, tensor by tensor."""
        blocks = [tensor.select(axis, number) for tensor, axis in zip(self.tensors, self.block_axes, strict=True)]
        return [block.contiguous().view(torch.uint8).numpy().tobytes() for block in blocks]


def memory(order: str, sizes: dict[str, int], logical: str, dtype: torch.dtype, padding: int = 0) -> torch.Tensor:
    """A tensor of axes `logical` whose memory is in `order`, its innermost axis followed by `padding` elements."""
    shape = [sizes[name] for name in order]
    shape[-1] += padding
    flat = torch.full((math.prod(shape) * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8).view(dtype)
    tensor = flat.view(shape)[..., : sizes[order[-1]]]
    return tensor.permute([order.index(name) for name in logical])


def a_layer_each(
    format: str, logical: str, orders: Sequence[str], heads: int = 1, width: int = 1
) -> Callable[..., Cache]:
    """Layers of one shape, in one storage or in one each."""

    def make(sizes: Sizes, num_blocks: int, order: int) -> Cache:
        of = {
            "L": sizes.layers, "B": num_blocks, "K": 2, "H": sizes.heads * heads, "N": sizes.tokens,
            "D": sizes.dim * width,
        }  # fmt: skip
        inner = orders[order % len(orders)]
        if sizes.shared:
            together = memory("L" + inner, of, "L" + logical, sizes.dtype, sizes.padding)
            tensors = list(together.unbind(0))
        else:
            tensors = [memory(inner, of, logical, sizes.dtype, sizes.padding) for _ in range(sizes.layers)]
        return Cache(format, tensors, [logical.index("B")] * sizes.layers)

    return make


def cross_layer(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    of = {"L": sizes.layers, "B": num_blocks, "H": sizes.heads, "N": sizes.tokens, "D": 2 * sizes.dim}
    inner = ("BLNHD", "BHLND", "BLHND", "LBNHD", "LHBND")[order % 5]
    return Cache("vllm_packed", [memory(inner, of, "LBHND", sizes.dtype, sizes.padding)], [1])


def mla_with_side_tensors(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    """Each layer's latent, and beside every second one a narrower tensor of bytes (an indexer's keys, with scales)."""
    tensors = []
    for layer in range(sizes.layers):
        of = {"B": num_blocks, "N": sizes.tokens, "D": 9 * sizes.dim}
        tensors.append(memory("BND", of, "BND", sizes.dtype, sizes.padding))
        if layer % 2 == order % 2:
            of["D"] = 2 * sizes.dim + 4
            tensors.append(memory("BND", of, "BND", torch.uint8, sizes.padding))
    return Cache("mla", tensors, [0] * len(tensors))


def fp8_with_scales(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    """Elements of eight bits, and a scale of 32 bits for each token and head beside them."""
    tensors = []
    inner = ("KBNHD", "KBHND")[order % 2]
    for _ in range(sizes.layers):
        of = {"K": 2, "B": num_blocks, "N": sizes.tokens, "H": sizes.heads, "D": sizes.dim}
        tensors.append(memory(inner, of, "KBNHD", torch.float8_e4m3fn, sizes.padding))
        tensors.append(memory(inner, {**of, "D": 1}, "KBNHD", torch.float32))
    return Cache("vllm_flash_attention", tensors, [1] * len(tensors))


def trtllm(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    hints = trtllm_hints(sizes, order)
    factor = 1 + order // 2 % 2
    of = {"B": num_blocks, "L": sizes.layers, "K": factor, "D": sizes.heads * sizes.tokens * sizes.dim}
    return Cache("trtllm_pool", [memory("BLKD", of, "BLKD", sizes.dtype)], [0], hints)


def trtllm_slots(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    """Regions of page slots: a part of the layers in each, of which each slot is followed by something else."""
    a_layer = 2 * sizes.heads * sizes.tokens * sizes.dim
    cut = order % sizes.layers
    widths = [layers * a_layer for layers in (sizes.layers - cut, cut) if layers]
    tensors = [memory("BD", {"B": num_blocks, "D": width}, "BD", sizes.dtype, 8 * sizes.padding) for width in widths]
    return Cache("trtllm_regions", tensors, [0] * len(tensors), trtllm_hints(sizes, order))


def trtllm_hints(sizes: Sizes, order: int) -> LayoutHints:
    return LayoutHints(
        kv_layout=("NHD", "HND")[order % 2],
        tokens_per_block=sizes.tokens,
        num_layers=sizes.layers,
        num_kv_heads=sizes.heads,
        head_dim=sizes.dim,
        dtype=str(sizes.dtype).removeprefix("torch."),
    )


def pages(sizes: Sizes, num_blocks: int, order: int) -> Cache:
    """A K and a V pool of tokens a layer; the axis of blocks is split off for the test only."""
    shape = (num_blocks * sizes.tokens, sizes.heads, sizes.dim)
    flats = [torch.full((math.prod(shape),), UNTOUCHED, dtype=torch.uint8) for _ in range(2 * sizes.layers)]
    return Cache(
        "token_pool", [flat.view(shape) for flat in flats], [0] * len(flats), LayoutHints(tokens_per_block=sizes.tokens)
    )


def host_pages(name: str, *axes: str) -> Callable[[Sizes, int, int], Cache]:
    """SGLang's pages of all layers, with K and V or, where the format has that, one of them."""

    def make(sizes: Sizes, num_blocks: int, order: int) -> Cache:
        of = {"B": num_blocks, "L": sizes.layers, "K": 2, "N": sizes.tokens, "H": sizes.heads, "D": sizes.dim}
        names = axes[order % len(axes)]
        hints = LayoutHints(tokens_per_block=sizes.tokens, num_layers=sizes.layers, num_kv_heads=sizes.heads)
        return Cache(name, [memory(names, of, names, sizes.dtype)], [0], hints)

    return make


MAKERS: dict[str, Callable[[Sizes, int, int], Cache]] = {
    "vllm_flash_attention": a_layer_each("vllm_flash_attention", "KBNHD", ["KBNHD", "KBHND", "BKNHD"]),
    "vllm_flashinfer": a_layer_each("vllm_flashinfer", "BKNHD", ["BKNHD", "BKHND", "KBNHD"]),
    "vllm_packed": a_layer_each("vllm_packed", "BHND", ["BNHD", "BHND", "HBND"], width=2),
    "vllm_nvfp4": a_layer_each("vllm_nvfp4", "BHND", ["BNHD", "BHND"], heads=2),
    "mla": a_layer_each("mla", "BND", ["BND"]),
    "trtllm_pool": trtllm,
    "trtllm_regions": trtllm_slots,
    "token_pool": pages,
    "sglang_layer_first": host_pages("sglang_layer_first", "BLKNHD", "BLNHD"),
    "sglang_page_first": host_pages("sglang_page_first", "BKNLHD", "BNLHD"),
    "sglang_page_first_direct": host_pages("sglang_page_first_direct", "BKLNHD", "BLNHD"),
    "sglang_page_head": host_pages("sglang_page_head", "BKHNLD"),
}
MORE: dict[str, Callable[[Sizes, int, int], Cache]] = {
    "cross layer": cross_layer,
    "MLA with side tensors": mla_with_side_tensors,
    "FP8 with scales": fp8_with_scales,
}

sizes = st.builds(
    Sizes,
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    tokens=st.sampled_from([1, 4, 16]),
    dim=st.sampled_from([1, 2, 8]),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([0, 0, 3]),
    shared=st.booleans(),
)


def test_every_format_is_tried() -> None:
    assert list(MAKERS) == list(FORMATS)


@pytest.mark.parametrize("name", [*MAKERS, *MORE])
@settings(deadline=None, max_examples=60)
@given(sizes=sizes, order=st.integers(0, 29), data=st.data())
def test_blocks_are_the_same_bit_for_bit(name: str, sizes: Sizes, order: int, data: st.DataObject) -> None:
    if name == "vllm_nvfp4":
        sizes = Sizes(**{**sizes.__dict__, "dtype": torch.uint8})
    make = {**MAKERS, **MORE}[name]
    here, there = make(sizes, 6, order), make(sizes, 9, order)
    layout, other = here.layout(), there.layout()
    assert layout.fingerprint() == other.fingerprint()
    pages_of = sizes.tokens if name == "token_pool" else 1
    rng = np.random.default_rng(order)
    for storage in here.storages():
        storage[:] = rng.integers(0, 256, storage.size, dtype=np.uint8)
    sources = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    targets = data.draw(st.permutations(range(9)))[: len(sources)]
    before = [storage.copy() for storage in there.storages()]
    scatter(other, there.storages(), targets, gather(layout, here.storages(), sources, num_chunks=1))
    for source, target in zip(sources, targets, strict=True):
        for token in range(pages_of):
            assert there.block(target * pages_of + token) == here.block(source * pages_of + token)
    scatter(other, there.storages(), targets, gather(other, before, targets, num_chunks=1))
    for storage, was in zip(there.storages(), before, strict=True):
        assert np.array_equal(storage, was)  # nothing but those blocks was written


@settings(deadline=None, max_examples=60)
@given(sizes=sizes, order=st.integers(0, 29))
def test_no_two_formats_take_each_others_blocks(sizes: Sizes, order: int) -> None:
    """The same sizes in any two formats, or in another order of memory, have nothing in common."""
    made = {name: make(sizes, 4, order) for name, make in MAKERS.items() if name != "vllm_nvfp4"}
    fingerprints = [cache.layout().fingerprint() for cache in made.values()]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize("name", ["trtllm_pool", "trtllm_regions"])
@settings(deadline=None, max_examples=40)
@given(
    sizes=sizes,
    order=st.integers(0, 29),
    field=st.sampled_from(["num_layers", "num_kv_heads", "tokens_per_block", "head_dim"]),
)
def test_configurations_that_the_bytes_contradict_are_refused(name: str, sizes: Sizes, order: int, field: str) -> None:
    cache = MAKERS[name](sizes, 4, order)
    wrong = msgspec.structs.replace(cache.hints, **{field: getattr(cache.hints, field) * 7})
    with pytest.raises(LayoutError):
        Cache(cache.format, cache.tensors, cache.block_axes, wrong).layout()
    with pytest.raises(LayoutError, match="dtype"):
        Cache(
            cache.format, cache.tensors, cache.block_axes, msgspec.structs.replace(cache.hints, dtype="int64")
        ).layout()
