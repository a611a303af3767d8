"""Work that is too long for one round of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable

ITEM_S = 0.001
TICK_S = 0.005


class Budget:
    """The time that one handler may spend on work which can go on in the next round."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.perf_counter() + limit_s

    def spend(self, step: Callable[[], bool]) -> bool:
        """Call `step`, and again while it says that there is more and time is left; whether there is more."""
        while step():
            if time.perf_counter() >= self._end:
                return True
        return False
