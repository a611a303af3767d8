"""Tensors as one dense run of bytes: by permuting axes where that is enough, refused where it is not."""

from __future__ import annotations

import torch

from kvferry.errors import NotContiguousError


def attempt_permute_to_contiguous_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` with its axes in memory order, if that makes it contiguous; else `tensor` itself.

    Metadata only: no byte is copied. The axes with the larger strides come first, so an NHD view of HND memory comes
    back as HND; axes of equal strides, which only those of size 1 may have, keep their order.
    """
    if tensor.is_contiguous():
        return tensor
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    order = sorted(range(len(sizes)), key=lambda axis: (-strides[axis], -sizes[axis], axis))
    permuted = tensor.permute(order)
    return permuted if permuted.is_contiguous() else tensor


def assert_contiguous(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not one dense run in row-major order; never copies.

    Raises:
        NotContiguousError: the text gives shape and stride.
    """
    if not tensor.is_contiguous():
        raise NotContiguousError(
            f"a tensor of shape {tuple(tensor.shape)} and stride {tuple(tensor.stride())} has gaps or overlaps between "
            "its elements, in any order of its axes: share the tensor that it is a view of, and send this view's "
            "offsets and strides beside it. It is not copied, since writes to a copy would be lost"
        )


def dense_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its axes in memory order; NotContiguousError when its bytes are not one dense run."""
    view = attempt_permute_to_contiguous_view(tensor)
    assert_contiguous(view)
    return view
