from __future__ import annotations

import pytest

from doubles.fake_cuda import installed
from doubles.fake_memory import TOTAL_BYTES
from kvferry.errors import NcclError, SameDeviceError
from kvferry.p2p.nccl.preflight import check_devices, check_memory, shm_note


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    check_devices("GPU-1", "GPU-2")
    with pytest.raises(SameDeviceError, match=r"both on GPU-1: NCCL does not join.*IPC"):
        check_devices("GPU-1", "GPU-1")


def test_too_little_gpu_memory_is_told_with_both_figures() -> None:
    with installed():
        check_memory(0, TOTAL_BYTES)
        with pytest.raises(NcclError, match=r"up to 65537 MiB of GPU memory, and 65536 MiB are free on device 0"):
            check_memory(0, TOTAL_BYTES + (1 << 20))


def test_a_small_shm_is_named() -> None:
    assert "/proc has only 0 MiB free, and NCCL needs some" in shm_note("/proc")  # which has no free space ever
    assert "cannot be looked at" in shm_note("/missing")
