"""p2p engines in processes of their own, for one test."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from serving.process import Side, Zygote, eventually

CACHES = {"num_blocks": 64, "num_layers": 4}


class Sides:
    """Starts them, and ends all of them, also those that are stopped."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._sides: list[Side] = []

    def start(self, *, caches: dict[str, int] | None = None, **config: Any) -> Side:
        """An engine with caches of 64 blocks and 4 layers, unless they are told otherwise."""
        side = self._zygote.start("p2p", caches={**CACHES, **(caches or {})}, **config)
        self._sides.append(side)
        return side

    def close(self) -> None:
        for side in self._sides:
            with contextlib.suppress(ProcessLookupError):
                os.kill(side.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                side.close()
        for side in self._sides:
            eventually(lambda pid=side.pid: not os.path.exists(f"/proc/{pid}"), 20)  # type: ignore[misc]


def address_of(side: Side) -> str:
    """Where peers reach it."""
    address: str = side.call("address")["address"]
    return address
