"""How long after a process is killed its memory is free again, as a bystander sees it."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvferry.cuda.memory import memory_info

__all__ = ["CudaMemory", "HostMemory", "MemoryBack", "MemoryProbe", "measure_memory_back", "probe_for"]

SLACK_PART = 0.02  # of the expected bytes: what rounding, page tables and bystanders may move
POLL_S = 0.0002


class MemoryProbe(Protocol):
    """What the system says about one kind of memory."""

    def free_bytes(self) -> int:
        """Free now; only differences between two readings mean anything."""

    def held_bytes(self, pid: int, reported: int) -> int:
        """How much of it the engine `pid` holds and must give back; `reported` is what the engine says itself."""


class HostMemory:
    """Shared memory of the whole machine: the kernel's own count of pages in memfds and tmpfs.

    An engine's KV cache is one memfd, and its pages stay until the last process that maps it, here the cache server,
    has let go; private memory of the dead process is none of KVferry's business and is not counted.
    """

    def free_bytes(self) -> int:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("Shmem:"):
                    return -int(line.split()[1]) * 1024
        raise OSError("/proc/meminfo has no line Shmem; this kernel does not count shared memory")

    def held_bytes(self, pid: int, reported: int) -> int:
        files: dict[int, int] = {}
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd).startswith("/memfd:"):
                facts = fd.stat()
                files[facts.st_ino] = facts.st_blocks * 512
        return max(files.values(), default=0)


class CudaMemory:
    """Free memory of one GPU from the driver, in a process that is neither the engine nor the server."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def free_bytes(self) -> int:
        return memory_info(self._ordinal)[0]

    def held_bytes(self, pid: int, reported: int) -> int:
        return reported


def probe_for(device: str) -> MemoryProbe:
    """The probe for engines on `cpu` or `cuda`."""
    return CudaMemory(0) if device == "cuda" else HostMemory()


class MemoryBack(NamedTuple):
    """`ms` from the kill until `num_bytes` were back; None where they were not within the time limit."""

    ms: float | None
    num_bytes: int


def measure_memory_back(
    probe: MemoryProbe,
    kill: Callable[[], None],
    expected_bytes: int,
    *,
    timeout_s: float = 10.0,
    settle_s: float = 0.3,
) -> MemoryBack:
    """Call `kill` and watch `probe` until all that comes back has come back.

    A dying process gives memory back in parts (a GPU context is freed beside the KV cache), so the first moment with
    enough free bytes may be a part that was not waited for: watching goes on until nothing more has come for
    `settle_s`, and the time is that of the last part.
    """
    slack = int(expected_bytes * SLACK_PART)
    before = probe.free_bytes()
    back, back_at, now = 0, 0.0, 0.0
    started = time.perf_counter()
    kill()
    while now < timeout_s:
        gained = probe.free_bytes() - before
        now = time.perf_counter() - started
        if gained > back + slack:
            back, back_at = gained, now
        if back >= expected_bytes - slack and now - back_at > settle_s:
            return MemoryBack(back_at * 1e3, back)
        time.sleep(POLL_S)
    return MemoryBack(None, back)
