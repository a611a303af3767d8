"""What every test shares: the `gpu` marker, which needs a driver and a device; no thread may outlive the run."""

from __future__ import annotations

import os
import sys
import threading

import pytest

_THREAD_END_S = 10.0


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


def pytest_unconfigure() -> None:
    """Fail where a thread is left that would keep this process from ending, rather than hang there for ever."""
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in left:
        thread.join(_THREAD_END_S / len(left))
    if any(thread.is_alive() for thread in left):
        names = ", ".join(f"{thread.name}" for thread in left if thread.is_alive())
        sys.stderr.write(f"threads outlive the tests that started them: {names}\n")
        sys.stderr.flush()
        os._exit(1)
