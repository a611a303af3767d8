"""How long after a process is killed its memory is free again, as a bystander sees it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvferry.cuda.memory import memory_info

__all__ = ["CudaHeld", "Held", "HostHeld", "MemoryBack", "find_held", "measure_memory_back"]

SLACK_PART = 0.02  # of the expected bytes: what rounding, page tables and bystanders may move
POLL_S = 0.0002
LOOK_S = 0.002  # between looks at who refers to the memory
PATIENCE_S = 1.0  # for the count of free bytes to show what the end of the last reference did


class Held(Protocol):
    """Memory of one engine that must come back, and what the system says about it."""

    num_bytes: int

    def free_bytes(self) -> int:
        """Free on the whole machine or GPU now; only differences between two readings mean anything."""

    def is_referred_to(self) -> bool | None:
        """Whether some process still holds it; None where nobody tells."""


class HostHeld:
    """The memfd with an engine's KV cache, watched through the kernel's count of pages in memfds and tmpfs.

    Its pages stay until the last process that has it, here the engine or the cache server, lets go. Private memory of
    the dead engine is none of KVferry's business and is not counted.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids`: the engine, then all others that may have its memory."""
        self._pids = pids
        self._inode, self.num_bytes = _largest_memfd(pids[0])

    def free_bytes(self) -> int:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("Shmem:"):
                    return -int(line.split()[1]) * 1024
        raise OSError("/proc/meminfo has no line Shmem; this kernel does not count shared memory")

    def is_referred_to(self) -> bool:
        return any(_has_memfd(pid, self._inode) for pid in self._pids)


class CudaHeld:
    """GPU memory, by the driver's count in a process that is neither the engine nor the server."""

    def __init__(self, num_bytes: int, ordinal: int = 0) -> None:
        self.num_bytes = num_bytes
        self._ordinal = ordinal

    def free_bytes(self) -> int:
        return memory_info(self._ordinal)[0]

    def is_referred_to(self) -> None:
        """The driver does not tell; `free_bytes` alone decides."""


def find_held(device: str, pids: Sequence[int], reported_bytes: int) -> Held:
    """What the first of `pids` must give back; `reported_bytes` is its own word, which counts on a GPU."""
    return CudaHeld(reported_bytes) if device == "cuda" else HostHeld(pids)


class MemoryBack(NamedTuple):
    """`ms` from the kill until `num_bytes` were back; None where they were not within the time limit.

    `seen` is `free` where the count of free bytes showed it, `unreferenced` where other processes moved that count so
    much that only the end of the last reference could be seen.
    """

    ms: float | None
    num_bytes: int
    seen: str = "free"


def measure_memory_back(
    held: Held, kill: Callable[[], None], *, timeout_s: float = 10.0, settle_s: float = 0.3
) -> MemoryBack:
    """Call `kill` and watch until all that comes back has come back.

    A dying process gives memory back in parts (a GPU context is freed beside the KV cache), so the first moment with
    enough free bytes may be a part that was not waited for: watching goes on until nothing more has come for
    `settle_s`, and the time is that of the last part.
    """
    slack = int(held.num_bytes * SLACK_PART)
    before = held.free_bytes()
    back, back_at, now = 0, 0.0, 0.0
    unreferenced_at = 0.0 if held.is_referred_to() is None else None
    look_at = 0.0
    started = time.perf_counter()
    kill()
    while now < timeout_s:
        gained = held.free_bytes() - before
        now = time.perf_counter() - started
        if gained > back + slack:
            back, back_at = gained, now
        if unreferenced_at is None and now >= look_at:
            look_at = now + LOOK_S
            unreferenced_at = None if held.is_referred_to() else now
        if unreferenced_at is not None and back >= held.num_bytes - slack and now - back_at > settle_s:
            return MemoryBack(max(back_at, unreferenced_at) * 1e3, back)
        if unreferenced_at and now - unreferenced_at > settle_s + PATIENCE_S:
            return MemoryBack(unreferenced_at * 1e3, held.num_bytes, "unreferenced")
        time.sleep(POLL_S)
    return MemoryBack(None, back)


def _largest_memfd(pid: int) -> tuple[int, int]:
    """Inode and bytes in memory of the process's largest memfd; that of an engine is its KV cache."""
    files = [(0, 0)]
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd).startswith("/memfd:"):
                facts = fd.stat()
                files.append((facts.st_ino, facts.st_blocks * 512))
    return max(files, key=lambda file: file[1])


def _has_memfd(pid: int, inode: int) -> bool:
    """Whether the process, if it lives, maps the memfd. A bare descriptor is not looked for: nobody keeps one."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as lines:
        return any("/memfd:" in line and int(line.split()[4]) == inode for line in lines)
    return False
