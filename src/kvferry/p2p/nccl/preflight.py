"""What is checked before two ranks join, and what is looked at when they could not."""

from __future__ import annotations

import os

from kvferry.cuda.memory import memory_info
from kvferry.errors import NcclError, SameDeviceError

_SMALL_SHM_BYTES = 64 << 20


def check_devices(own_uuid: str, peer_uuid: str) -> None:
    """Refuse two ranks on one GPU, by name; NCCL would refuse them late, or hang."""
    if own_uuid == peer_uuid:
        raise SameDeviceError(
            f"this process and its peer are both on {own_uuid}: NCCL does not join two ranks on one GPU. "
            "Use the same-host carrier (IPC), or give each engine a GPU of its own"
        )


def check_memory(device: int, needed: int) -> None:
    """Refuse a communicator that would not fit, before it takes a part of what is left."""
    free, _ = memory_info(device)
    if free < needed:
        raise NcclError(
            f"a communicator takes up to {needed >> 20} MiB of GPU memory, and {free >> 20} MiB are free on device "
            f"{device}: leave the engine less of it, or use fewer channels (max_ctas)"
        )


def shm_note(folder: str = "/dev/shm") -> str:
    """A sentence about /dev/shm where it is so small that NCCL may fail for it; else nothing."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f". {folder} cannot be looked at ({error}), and NCCL needs it"
    free = found.f_bavail * found.f_frsize
    if free >= _SMALL_SHM_BYTES:
        return ""
    return f". {folder} has only {free >> 20} MiB free, and NCCL needs some: make it larger (docker: --shm-size=1g)"
