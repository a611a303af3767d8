"""How much memory this process may have, checked before it is taken: one that takes too much is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import ShareError

_GIB = 1 << 30


def check_memory(nbytes: int, root: Path = Path("/")) -> None:
    """Raise ShareError where `nbytes` are more than the machine has free or a control group allows; names the limit."""
    for limit, what in (*_free_memory(root), *_control_group_limits(root)):
        if nbytes > limit:
            raise ShareError(
                f"{nbytes} bytes ({nbytes / _GIB:.1f} GiB) of memory are asked for, but {what} is {limit} bytes "
                f"({limit / _GIB:.1f} GiB): give less memory, or raise that limit"
            )


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
