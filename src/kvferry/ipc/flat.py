"""All bytes under a tensor."""

from __future__ import annotations

import torch


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as flat uint8, on the same device; shares its memory and keeps it alive."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
