"""What every test shares: the `gpu` marker, which needs a driver and a device."""

from __future__ import annotations

import pytest


def _gpu_missing() -> str | None:
    """Why the `gpu` tests cannot run here, or None."""
    import torch

    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_missing() if marked else None
    if reason is None:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
