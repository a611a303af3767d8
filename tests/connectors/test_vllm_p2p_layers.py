"""Blocks of one layer, out of the paged cache and back, for all the shapes that vLLM has had."""

from __future__ import annotations

import pytest
import torch

from kvferry.connectors.vllm import extract_kv_from_layer, inject_kv_into_layer
from kvferry.errors import BlockIdError, LayoutError

BLOCKS = 6
SHAPES = {
    "flash attention": ((2, BLOCKS, 4, 3, 8), 1),
    "flashinfer": ((BLOCKS, 2, 4, 3, 8), 0),
    "packed": ((BLOCKS, 3, 4, 16), 0),
    "packed, two heads": ((BLOCKS, 2, 4, 16), 0),
    "packed, two blocks": ((2, 3, 4, 16), 0),
    "latent": ((BLOCKS, 4, 24), 0),
    "latent, two blocks": ((2, 4, 24), 0),
    "latent with a head": ((BLOCKS, 1, 4, 24), 0),
}


def filled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES)
def test_what_is_taken_out_and_put_back(shape: tuple[int, ...], axis: int) -> None:
    layer = filled(shape)
    ids = torch.tensor([1, 0] if shape[axis] == 2 else [4, 0, 2])
    taken = extract_kv_from_layer(layer, ids)
    assert taken.equal(torch.stack([layer.select(axis, int(number)) for number in ids], axis))
    other = torch.zeros(shape)
    targets = ids.flip(0)
    inject_kv_into_layer(other, taken, targets, "r")
    assert extract_kv_from_layer(other, targets).equal(taken)
    untouched = [number for number in range(shape[axis]) if number not in ids.tolist()]
    assert not other.index_select(axis, torch.tensor(untouched, dtype=torch.int64)).any()


def test_strides_do_not_matter() -> None:
    """Heads outermost in memory, or tokens: the view says which axis is which."""
    memory = filled((BLOCKS, 4, 3, 16))
    layer = memory.permute(0, 2, 1, 3)
    ids = torch.tensor([5, 1])
    assert extract_kv_from_layer(layer, ids).equal(layer[ids])
    other = torch.zeros(BLOCKS, 4, 3, 16).permute(0, 2, 1, 3)
    inject_kv_into_layer(other, layer[ids], ids, "r")
    assert other[ids].equal(layer[ids])


def test_blocks_that_a_kernel_has_in_parts() -> None:
    layer = filled((BLOCKS * 2, 3, 2, 16))
    taken = extract_kv_from_layer(layer, torch.tensor([3, 0]), num_blocks=BLOCKS)
    assert taken.equal(layer[torch.tensor([6, 7, 0, 1])])
    inject_kv_into_layer(layer, taken, torch.tensor([1, 2]), "r", num_blocks=BLOCKS)
    assert layer[2:6].equal(taken)


def test_a_shape_that_could_be_two_things_is_told_apart_or_refused() -> None:
    layer = filled((2, 2, 4, 3, 8))
    with pytest.raises(LayoutError, match="not known"):
        extract_kv_from_layer(layer, torch.tensor([0]))
    layer = filled((2, 2, 4, 3, 8)).expand(2, 2, 4, 3, 8)
    with pytest.raises(LayoutError, match="not known"):
        extract_kv_from_layer(layer, torch.tensor([0]), num_blocks=2)
    wide = filled((2, 4, 4, 3, 8))
    assert extract_kv_from_layer(wide, torch.tensor([3]), num_blocks=4).shape == (2, 1, 4, 3, 8)


@pytest.mark.parametrize("shape", [(4, 8), (3, 3, 4, 3, 8), (1, 2, 3, 4, 5, 6)])
def test_unknown_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="not known"):
        extract_kv_from_layer(filled(shape), torch.tensor([0]))


@pytest.mark.parametrize("ids", [[6], [-1], [[1]]])
def test_ids_outside_the_cache_are_refused(ids: list[int]) -> None:
    with pytest.raises(BlockIdError):
        extract_kv_from_layer(filled((BLOCKS, 4, 24)), torch.tensor(ids))


def test_kv_that_does_not_fit_is_refused_and_nothing_written() -> None:
    layer = torch.zeros(BLOCKS, 4, 24)
    for kv in (torch.ones(2, 4, 24), torch.ones(3, 4, 25), torch.ones(3, 4, 24, dtype=torch.bfloat16)):
        with pytest.raises(LayoutError, match="request 'r7'"):
            inject_kv_into_layer(layer, kv, torch.tensor([0, 1, 2]), "r7")
    assert not layer.any()
