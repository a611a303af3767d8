"""What clients and engines do in forked children: one hook for all of them, since such hooks cannot be taken back."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What wants to know that it is in a forked child now."""

    def after_fork(self) -> None:
        """Runs in the child, once."""


def tell_after_fork(part: Forked) -> None:
    """Call `part.after_fork()` in every forked child, as long as somebody else holds the part."""
    _parts().add(part)


@functools.cache
def _parts() -> weakref.WeakSet[Forked]:
    parts: weakref.WeakSet[Forked] = weakref.WeakSet()

    def tell_all() -> None:
        for part in list(parts):
            part.after_fork()
        parts.clear()

    os.register_at_fork(after_in_child=tell_all)
    return parts
