"""Which bytes two engines have in common: all formats, both orders of axes, different tensor-parallel sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import LayoutHints
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.geometry import Shares, Span, check_compatible, check_geometry, common_pieces, shared_heads
from kvferry.p2p.signal.messages import About, Geometry, LayerGeometry

BLOCKS, TOKENS, DIM = 6, 4, 8
FORMATS = ("flash_nhd", "flash_hnd", "flashinfer_nhd", "flashinfer_hnd", "packed", "token_pool")


def about(caches: KVCaches | None, rank: int = 0, size: int = 1) -> About:
    geometry = None if caches is None else caches.geometry
    return About(
        address="h:1",
        host_id="h",
        device_uuid="",
        tp_rank=rank,
        tp_size=size,
        carriers=("host",),
        geometry=geometry,
    )


def make(format: str, kv: torch.Tensor) -> tuple[KVCaches, Any]:
    """Caches of two layers with the values of `kv`, `[layer, K, block, token, head, dim]`; and views of them."""
    heads = kv.shape[4]
    caches: dict[str, torch.Tensor] = {}
    views = []
    hints: dict[str, Any] = {}
    for layer, values in enumerate(kv):
        if format.startswith("flash_"):
            order = (0, 1, 2, 3, 4) if format.endswith("nhd") else (0, 1, 3, 2, 4)
            name = "vllm_flash_attention"
            to_tensor = (0, 1, 2, 3, 4)
        elif format.startswith("flashinfer"):
            order = (1, 0, 2, 3, 4) if format.endswith("nhd") else (1, 0, 3, 2, 4)
            name = "vllm_flashinfer"
            to_tensor = (1, 0, 2, 3, 4)
        elif format == "packed":
            name = "vllm_packed"  # [NB, NH, BS, 2 * HS]
            tensor = values.permute(1, 3, 2, 0, 4).reshape(BLOCKS, heads, TOKENS, 2 * DIM).contiguous()
            caches[f"l{layer}"] = tensor
            views.append(tensor.view(BLOCKS, heads, TOKENS, 2, DIM).permute(3, 0, 2, 1, 4))
            continue
        else:
            name = "token_pool"
            hints = {"tokens_per_block": TOKENS}
            for index, kind in enumerate("kv"):
                caches[f"l{layer}{kind}"] = values[index].reshape(BLOCKS * TOKENS, heads, DIM).clone()
            pair = [caches[f"l{layer}{kind}"].view(BLOCKS, TOKENS, heads, DIM) for kind in "kv"]
            views.append(pair)
            continue
        memory = values.permute(order).contiguous()  # in memory order
        canonical = memory.permute(tuple(np.argsort(order)))
        caches[f"l{layer}"] = canonical.permute(to_tensor)
        views.append(canonical)
    return KVCaches.describe(caches, name, LayoutHints.from_mapping(hints)), views


def read(views: Any) -> torch.Tensor:
    return torch.stack([torch.stack(list(view)) if isinstance(view, list) else view for view in views])


def move(source: KVCaches, target: KVCaches, whos: tuple[About, About], ids: tuple[list[int], list[int]]) -> None:
    """What a carrier does, on both sides."""
    here, there = whos
    assert here.geometry is not None
    assert there.geometry is not None
    out, back = shared_heads(here, there), shared_heads(there, here)
    assert (out.mine, out.theirs) == (back.theirs, back.mine)
    for layer in range(len(source.layers)):
        kinds = here.geometry.kinds[here.geometry.layers[layer]], there.geometry.kinds[there.geometry.layers[layer]]
        pieces = common_pieces(*kinds, out), common_pieces(kinds[1], kinds[0], back)
        assert [piece.length for piece in pieces[0]] == [piece.length for piece in pieces[1]]
        reading = source.runs(layer, pieces[0], np.array(ids[0]))
        writing = target.runs(layer, pieces[1], np.array(ids[1]))
        assert reading.nbytes == writing.nbytes
        data = b"".join(take(reading))
        at = 0
        for buffer in take(writing):
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)


def take(runs: Any) -> list[memoryview]:
    found: list[memoryview] = []
    while (position := sum(map(len, found))) < runs.nbytes:
        found += runs.buffers(position, 1000)
    return found


def random_kv(heads: int, seed: int) -> torch.Tensor:
    shape = (2, 2, BLOCKS, TOKENS, heads, DIM)
    return torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "formats",
    [
        *((name, name) for name in FORMATS),
        ("flash_nhd", "flashinfer_nhd"),
        ("flashinfer_hnd", "flash_hnd"),
    ],
)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 4)])
def test_every_rank_gets_its_heads(formats: tuple[str, str], sizes: tuple[int, int]) -> None:
    """Each pair of ranks that share heads moves them; together they make up the whole KV."""
    heads, ids = 4, ([4, 0, 3], [1, 2, 5])
    kv, old = random_kv(heads, 1), random_kv(heads, 2)
    parts = [kv.chunk(size, dim=4) for size in sizes]
    sources = [make(formats[0], part) for part in parts[0]]
    targets = [make(formats[1], part) for part in old.chunk(sizes[1], dim=4)]
    for (p, source), (d, target) in itertools.product(enumerate(sources), enumerate(targets)):
        whos = about(source[0], p, sizes[0]), about(target[0], d, sizes[1])
        first, last = p * heads // sizes[0], d * heads // sizes[1]
        share = range(max(first, last), min(first + heads // sizes[0], last + heads // sizes[1]))
        if share:
            check_compatible(*whos)
            move(source[0], target[0], whos, ids)
        else:
            with pytest.raises(LayoutError, match=f"rank {p} of {sizes[0]} and rank {d} of {sizes[1]}|other heads"):
                check_compatible(*whos)
    for (_, views), wanted, before in zip(targets, parts[1], old.chunk(sizes[1], dim=4), strict=True):
        expected = before.clone()
        expected[:, :, ids[1]] = wanted[:, :, ids[0]]
        assert torch.equal(read(views), expected)


def test_mla_goes_between_any_sizes() -> None:
    """All ranks have all of it."""
    caches = KVCaches.describe({"l0": torch.zeros(6, 4, 36, dtype=torch.int16)}, "mla")
    check_compatible(about(caches, 1, 2), about(caches, 5, 8))


@pytest.mark.parametrize("sizes", [(2, 3), (8, 16)])
def test_sizes_that_do_not_split_the_same_heads(sizes: tuple[int, int]) -> None:
    """E9: both are named."""
    one, two = (make("flash_nhd", random_kv(2, 0))[0] for _ in range(2))
    with pytest.raises(LayoutError, match=f"rank 0 of {sizes[0]} and rank 0 of {sizes[1]} with 2 and 2 KV heads"):
        check_compatible(about(one, 0, sizes[0]), about(two, 0, sizes[1]))


def test_other_orders_of_axes_are_refused() -> None:
    nhd, hnd = make("flash_nhd", random_kv(2, 0))[0], make("flash_hnd", random_kv(2, 0))[0]
    with pytest.raises(LayoutError, match="K2N4H2D8 int16 and of K2H2N4D8 int16"):
        check_compatible(about(nhd), about(hnd))


def test_one_head_has_no_place_among_the_axes() -> None:
    """Nor does its order matter, then."""
    source, target = random_kv(2, 1), random_kv(1, 2)
    p, _ = make("flash_hnd", source)
    d, views = make("flash_nhd", target)
    whos = about(p, 0, 1), about(d, 1, 2)
    check_compatible(*whos)
    move(p, d, whos, ([0, 1], [2, 3]))
    assert torch.equal(read(views)[:, :, [2, 3]], source[:, :, [0, 1], :, 1:])


@pytest.mark.parametrize(
    "change",
    [
        {"axes": "K2N4H2D7"},
        {"axes": "K2n4"},
        {"axes": "K0N4"},
        {"lengths": (1,)},
        {"itemsize": 4},
    ],
)
def test_a_geometry_that_contradicts_itself(change: dict[str, Any]) -> None:
    kind = {"axes": "K2N4H2D8", "itemsize": 2, "dtype": "int16", "lengths": (128, 128), **change}
    with pytest.raises(LayoutError):
        check_geometry(Geometry(4, 2, ("l",), (LayerGeometry(**kind),), (0,)))


def test_layers_of_unknown_kinds() -> None:
    kind = LayerGeometry("N4", 2, "int16", (8,))
    for names, layers in ((("l",), (1,)), (("l", "m"), (0,))):
        with pytest.raises(LayoutError, match="do not go together"):
            check_geometry(Geometry(4, 0, names, (kind,), layers))


@given(
    mine=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 40), max_size=12),
)
def test_pieces_cover_each_byte_once(mine: list[int], cuts: list[int]) -> None:
    """Whatever the runs are in which either side has its block."""
    total = sum(mine)
    ends = sorted({cut for cut in itertools.accumulate(cuts) if cut < total} | {total})
    theirs = [end - start for start, end in itertools.pairwise([0, *ends])]
    one = LayerGeometry(f"N{total}", 1, "uint8", tuple(mine))
    two = LayerGeometry(f"N{total}", 1, "uint8", tuple(theirs))
    shares = Shares(None, None)
    here, there = common_pieces(one, two, shares), common_pieces(two, one, shares)
    assert [piece.length for piece in here] == [piece.length for piece in there]
    for pieces, lengths in ((here, mine), (there, theirs)):
        starts = [0, *itertools.accumulate(lengths)]
        covered = [(starts[plane] + start, starts[plane] + start + size) for plane, start, size in pieces]
        assert [edge for pair in covered for edge in pair][1:-1:2] == [edge for pair in covered for edge in pair][2::2]
        assert (covered[0][0], covered[-1][1]) == (0, total)
        assert all(start + size <= lengths[plane] for plane, start, size in pieces)


def test_spans_beyond_the_heads() -> None:
    kind = LayerGeometry("N4H2D8", 2, "int16", (128,))
    with pytest.raises(LayoutError, match="do not have heads"):
        common_pieces(kind, kind, Shares(Span(1, 3), Span(1, 3)))
