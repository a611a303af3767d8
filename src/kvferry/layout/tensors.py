"""An engine's tensors as views of their storages. Tensors are only asked what torch's answer: torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.layout.hints import TensorView


def view_tensors(tensors: Iterable[Any]) -> tuple[list[TensorView], list[Any]]:
    """A view of each tensor, and one tensor of each distinct storage, in the order of the views' storage numbers."""
    numbers: dict[int, int] = {}
    owners: list[Any] = []
    views = []
    for tensor in tensors:
        number = numbers.setdefault(tensor.untyped_storage().data_ptr(), len(owners))
        if number == len(owners):
            owners.append(tensor)
        views.append(_view(tensor, number))
    return views, owners


def _view(tensor: Any, storage: int) -> TensorView:
    return TensorView(
        storage=storage,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        storage_offset=int(tensor.storage_offset()),
        itemsize=int(tensor.element_size()),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
