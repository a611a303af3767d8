"""What the kernel `copy_runs` does, for the double of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from doubles.fake_cuda import FakeDriver

_ROW_WORDS = 4


def install(driver: FakeDriver) -> None:
    """Let modules that are loaded from now on have a kernel `copy_runs`."""
    driver.fake.kernels["copy_runs"] = _copy_runs


def _copy_runs(places: list[int]) -> Callable[[], None]:
    table = ctypes.c_uint64.from_address(places[0]).value
    count = ctypes.c_uint32.from_address(places[1]).value

    def run() -> None:
        # The table is read when the kernel runs, as on a GPU: one that was written again too early shows.
        words = (ctypes.c_uint64 * (_ROW_WORDS * count)).from_address(table)
        for row in range(count):
            source, target, nbytes, _ = words[_ROW_WORDS * row : _ROW_WORDS * (row + 1)]
            ctypes.memmove(target, source, nbytes)

    return run
