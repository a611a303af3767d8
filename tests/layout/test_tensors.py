"""An engine's tensors as views of their storages."""

from __future__ import annotations

import torch

from kvferry.ipc.flat import storage_bytes
from kvferry.layout import TensorView, view_tensors


def test_each_storage_has_a_number_in_the_order_of_first_use() -> None:
    one, other = torch.zeros(4, 6), torch.zeros(2, 3, dtype=torch.bfloat16)
    views, owners = view_tensors([one[1:, ::2], other.t(), one])
    assert views == [
        TensorView(0, (3, 3), (6, 2), 6, 4, "float32"),
        TensorView(1, (3, 2), (1, 3), 0, 2, "bfloat16"),
        TensorView(0, (4, 6), (6, 1), 0, 4, "float32"),
    ]
    assert [owner.untyped_storage().data_ptr() for owner in owners] == [one.data_ptr(), other.data_ptr()]


def test_the_bytes_of_a_storage_are_all_of_it() -> None:
    tensor = torch.arange(24, dtype=torch.int32)
    flat = storage_bytes(tensor[5:7])
    assert (flat.dtype, flat.shape) == (torch.uint8, (96,))
    flat[:4] = 255
    assert int(tensor[0]) == -1
