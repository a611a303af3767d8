from __future__ import annotations

import itertools

import pytest
import torch

from kvferry.errors import NotContiguousError
from kvferry.ipc.permute import assert_contiguous, attempt_permute_to_contiguous_view


def test_a_contiguous_tensor_comes_back_itself() -> None:
    tensor = torch.zeros(2, 3)
    assert attempt_permute_to_contiguous_view(tensor) is tensor


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_axes_is_put_in_memory_order_without_copying(order: tuple[int, ...]) -> None:
    memory = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    view = attempt_permute_to_contiguous_view(memory.permute(order))
    assert view.is_contiguous()
    assert view.data_ptr() == memory.data_ptr()
    assert torch.equal(view.flatten(), memory.flatten())


def test_nhd_over_hnd_memory_comes_back_as_hnd() -> None:
    hnd = torch.zeros(2, 10, 8, 16, 64)  # K/V, blocks, heads, tokens, head size
    nhd = hnd.permute(0, 1, 3, 2, 4)
    assert attempt_permute_to_contiguous_view(nhd).shape == hnd.shape


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1, 1, 1), (3, 1, 5)])
def test_axes_of_size_one_are_no_obstacle(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flipped = tensor.permute(*reversed(range(len(shape))))
    view = attempt_permute_to_contiguous_view(flipped)
    assert_contiguous(view)
    assert torch.equal(view.flatten(), tensor.flatten())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 8)[:, :4], torch.zeros(4, 8)[::2], torch.zeros(4, 1).expand(4, 3), torch.zeros(8).unfold(0, 4, 2)],
    ids=["columns", "every second row", "expanded", "overlapping"],
)
def test_gaps_and_overlaps_are_refused_with_shape_and_stride(tensor: torch.Tensor) -> None:
    view = attempt_permute_to_contiguous_view(tensor)
    assert view is tensor
    with pytest.raises(NotContiguousError) as caught:
        assert_contiguous(view)
    assert isinstance(caught.value, ValueError)
    assert str(tuple(tensor.shape)) in str(caught.value)
    assert str(tuple(tensor.stride())) in str(caught.value)
