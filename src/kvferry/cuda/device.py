"""Devices by UUID and by ordinal, and the context that calls run in.

Ordinals are the driver's, which are torch's too: both follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvferry.cuda.driver import Driver, driver
from kvferry.errors import UnknownDeviceError


def device_uuid(ordinal: int) -> str:
    """The device's UUID as nvidia-smi writes it: "GPU-..." or, for a slice of one, "MIG-..."."""
    return driver().visible_uuids()[ordinal]


def visible_uuids() -> list[str]:
    """The UUIDs of all visible devices, by ordinal."""
    return list(driver().visible_uuids())


def ordinal_of(device: str) -> int:
    """The ordinal, in this process, of the device with that UUID.

    Raises:
        UnknownDeviceError: it is not visible here; the text names it and those that are.
    """
    visible = driver().visible_uuids()
    if device not in visible:
        raise UnknownDeviceError(
            f"device {device} is not visible in this process, which sees {', '.join(visible)}: "
            "add it to CUDA_VISIBLE_DEVICES, or to the container's devices"
        )
    return visible.index(device)


@contextlib.contextmanager
def bound(ordinal: int) -> Iterator[Driver]:
    """Run the body with the device's primary context current, then leave the thread's context as it was.

    For any thread, also one that never made a CUDA call. Gives the driver to the body.
    """
    drv = driver()
    context = drv.primary_context(ordinal)
    if drv.current_context() == context:
        yield drv
        return
    drv.push_context(context)
    try:
        yield drv
    finally:
        drv.pop_context()


@contextlib.contextmanager
def bound_if_any(drv: Driver) -> Iterator[bool]:
    """Run the body with some context current, for questions that no device is known for yet.

    Gives False, and binds nothing, where no device has an active context: then no device memory exists either.
    """
    if drv.current_context():
        yield True
        return
    active = (ordinal for ordinal in range(drv.device_count()) if drv.primary_context_active(ordinal))
    first = next(active, None)
    if first is None:
        yield False
        return
    with bound(first):
        yield True


def enable_peer_access(ordinal: int, peer: int) -> None:
    """Let kernels on one device reach memory that belongs to another one's context, but for VMM memory. Idempotent.

    Raises CudaError where the two GPUs are not connected.
    """
    with bound(ordinal) as drv:
        drv.enable_peer_access(drv.primary_context(peer))
