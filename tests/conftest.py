"""What every test shares: the `gpu` marker, which needs a driver and a device; no thread may outlive the run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

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


def _threads_left() -> list[threading.Thread]:
    """Those that would keep this process from ending."""
    return [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]


@pytest.fixture(scope="session", autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Fail where a test has left a thread behind."""
    yield
    left = _threads_left()
    for thread in left:
        thread.join(_THREAD_END_S / len(left))
    names = ", ".join(thread.name for thread in left if thread.is_alive())
    assert not names, f"threads outlive the tests that started them: {names}"


def pytest_unconfigure() -> None:
    """End all the same where a thread is left, rather than hang for ever; the failure above has been reported."""
    if _threads_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
