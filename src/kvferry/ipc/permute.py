"""The order of a tensor's axes against the order of its bytes: metadata only, nothing is copied."""

from __future__ import annotations

import torch

from kvferry.errors import NotContiguousError


def attempt_permute_to_contiguous_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` with its axes in memory order where that is one dense run, else `tensor` itself."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis))
    view = tensor.permute(order)
    return view if view.is_contiguous() else tensor


def assert_contiguous(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose bytes are not one dense run in the order of its axes.

    Raises:
        NotContiguousError: with the shape and the stride.
    """
    if not tensor.is_contiguous():
        raise NotContiguousError(
            f"the tensor is not contiguous in any order of its axes: shape {tuple(tensor.shape)}, stride "
            f"{tensor.stride()}; share its whole storage, or a dense part of it (nothing is copied here)"
        )
