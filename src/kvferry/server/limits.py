"""How much memory this process may have, checked before it is taken: one that takes too much is killed."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import ShareError

_GIB = 1 << 30


def check_memory(nbytes: int, root: Path = Path("/")) -> None:
    """Raise ShareError where `nbytes` are more than the machine, a control group or ulimit allows; names the limit."""
    for limit, what in (*_process_limits(root), *_free_memory(root), *_control_group_limits(root)):
        if nbytes > limit:
            raise ShareError(
                f"{nbytes} bytes ({nbytes / _GIB:.1f} GiB) of memory are asked for, but {what} is {limit} bytes "
                f"({limit / _GIB:.1f} GiB): give less memory, or raise that limit"
            )


def what_limits_pinning(root: Path = Path("/")) -> str:
    """All that may stand against pinning memory, in words, for when it has failed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    limits = [f"the limit of locked memory (memlock, `ulimit -l`) is {memlock}"]
    limits += [f"{what} is {limit} bytes" for limit, what in (*_control_group_limits(root), *_free_memory(root))]
    return "; ".join(limits)


def _process_limits(root: Path) -> Iterator[tuple[int, str]]:
    """What `ulimit` leaves of this process's addresses, and of the size of a file, which shared memory is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            used = int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        yield max(0, soft - used), "what is left of the limit of addresses (RLIMIT_AS, `ulimit -v`)"
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        yield soft, "the limit of a file's size (RLIMIT_FSIZE, `ulimit -f`)"


def _free_memory(root: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) << 10, "what the machine has available (MemAvailable)"


def _control_group_limits(root: Path) -> Iterator[tuple[int, str]]:
    """The limits of this process's control groups, versions 1 and 2, and of those around them."""
    groups: list[str] = []
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    for group in groups:
        number, controllers, path = group.split(":", 2)
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # none is set, or "max"
                yield int((place / name).read_text()), f"the control group's limit {place / name}"
            if place == top:
                break
