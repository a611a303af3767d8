"""How the communicators of a device are made, and what of the environment stands against it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import NcclError

# All communicators of a device may run at once, and a block of threads that finds no place on the GPU keeps its peer's
# waiting: together they must fit on one (an A100 has 108 multiprocessors, an H200 132).
_MAX_CTAS_TOGETHER = 128
_HARDWARE_QUEUES = 8


@dataclass(frozen=True, kw_only=True)
class NcclSettings:
    """For all communicators of one device.

    `max_ctas`: multiprocessors that a transfer may take, which bounds its rate and its memory (`bytes_per_peer`): on an
    H200 4, 8 and 16 of them move 128, 249 and 332 GB/s. Both sides of a pair need the same number. `end_timeout_s`
    bounds each step of an end: what is still to be done, aborting (which takes half a second on an H200).
    """

    max_ctas: int = 8
    max_communicators: int = 12
    connect_timeout_s: float = 20.0
    end_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_ctas < 1 or self.max_communicators < 1:
            raise ValueError(
                f"max_ctas is {self.max_ctas}, max_communicators {self.max_communicators}: at least 1 each"
            )
        if self.max_ctas * self.max_communicators > _MAX_CTAS_TOGETHER:
            raise ValueError(
                f"{self.max_communicators} communicators of {self.max_ctas} CTAs would not run at once on one GPU: "
                f"the product may be {_MAX_CTAS_TOGETHER} at most"
            )
        if not (self.connect_timeout_s > 0 and self.end_timeout_s > 0):
            raise ValueError(f"time-outs of {self.connect_timeout_s} and {self.end_timeout_s} s: both must be above 0")

    @property
    def bytes_per_peer(self) -> int:
        """GPU memory that a communicator takes, all of it while it is made: measured with NCCL 2.28.9 on H200s."""
        return (4 + 16 * self.max_ctas) << 20


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse NCCL_COMM_BLOCKING=1, by which NCCL makes calls block whatever the program asked for: they could hang."""
    if environment.get("NCCL_COMM_BLOCKING") == "1":
        raise NcclError("NCCL_COMM_BLOCKING=1 is set: with it a peer that dies would hang this process. Unset it")


def launches_ahead(environment: Mapping[str, str] = os.environ) -> int:
    """How many transfers of a communicator may be launched at once while no other has any.

    One more than the one that runs hides the time that a launch takes. But with few hardware queues a launched transfer
    that waits for the one before it also holds up other streams, and a ring of engines could wait for each other.
    """
    text = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", str(_HARDWARE_QUEUES))
    return 2 if text.isdecimal() and int(text) >= _HARDWARE_QUEUES else 1
