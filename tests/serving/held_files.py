"""Files of the disk tier that wait until a test lets them go, in the server's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kvferry.cache.tiers import disk_file

_LONGEST_S = 10.0

Move = Callable[[int, Sequence[memoryview], int], int]


class HeldFiles:
    """From now on every file stops when its header has been written, or, with `whole`, before it is written or read."""

    def __init__(self, *, whole: bool) -> None:
        self.num_held = 0
        self._go = threading.Event()
        self._transfer = transfer = disk_file._transfer

        def wait_and_transfer(move: Move, fd: int, views: list[memoryview]) -> int:
            if move is os.pwritev and not whole:
                transfer(move, fd, views[:1])
            if move is os.pwritev or whole:
                self.num_held += 1
                self._go.wait(_LONGEST_S)
                self.num_held -= 1
            return transfer(move, fd, views)

        disk_file._transfer = wait_and_transfer

    def let_go(self) -> None:
        """All go on; later ones do not wait."""
        disk_file._transfer = self._transfer
        self._go.set()
