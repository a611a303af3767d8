"""The watch over memory that comes back."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable

import pytest

from kvferry.cli.memory_back import HostMemory, measure_memory_back

MIB = 1 << 20
HOLDER = """
import mmap, os, sys
fd = os.memfd_create("held")
os.ftruncate(fd, 64 << 20)
view = mmap.mmap(fd, 64 << 20)
view.write(bytes(64 << 20))
print("held", flush=True)
sys.stdin.read()
"""


class _Readings:
    """A probe that gives prepared readings, one for each look, and then the last for ever."""

    def __init__(self, mib: Iterable[int]) -> None:
        values = list(mib)
        self._values = itertools.chain(values, itertools.repeat(values[-1]))

    def free_bytes(self) -> int:
        return next(self._values) * MIB

    def held_bytes(self, pid: int, reported: int) -> int:
        return reported


def test_a_part_that_comes_first_is_not_taken_for_the_whole() -> None:
    """100 MiB are waited for; 120 of something else come first, the 100 only 50 ms later."""
    gains = [1000] + [1120] * 100 + [1220]
    back = measure_memory_back(_Readings(gains), lambda: None, 100 * MIB, settle_s=0.2)
    assert back.num_bytes == 220 * MIB
    assert back.ms is not None
    assert back.ms > 100 * 0.2


def test_memory_that_does_not_come_back_has_no_time() -> None:
    back = measure_memory_back(_Readings([10, 10, 60]), lambda: None, 100 * MIB, timeout_s=0.1)
    assert back == (None, 50 * MIB)


def test_a_killed_process_gives_its_memfd_back() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        probe = HostMemory()
        held = probe.held_bytes(holder.pid, 0)
        assert held == 64 * MIB
        back = measure_memory_back(probe, holder.kill, held, settle_s=0.05)
    assert back.ms is not None
    assert back.ms < 2000


def test_memory_that_another_process_still_holds_is_not_back() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        memfd = next(
            fd for fd in pathlib.Path(f"/proc/{holder.pid}/fd").iterdir() if os.readlink(fd).startswith("/memfd:")
        )
        kept = os.open(memfd, os.O_RDONLY)
        try:
            back = measure_memory_back(HostMemory(), holder.kill, 64 * MIB, timeout_s=0.3, settle_s=0.05)
        finally:
            os.close(kept)
    assert back.ms is None


def test_shared_memory_is_counted_by_the_kernel() -> None:
    probe = HostMemory()
    before = probe.free_bytes()
    fd = os.memfd_create("test")
    try:
        os.write(fd, bytes(32 * MIB))
        deadline = time.monotonic() + 5
        while before - probe.free_bytes() < 31 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.close(fd)


@pytest.mark.parametrize("expected", [1, 100 * MIB])
def test_the_kill_happens_once_and_first(expected: int) -> None:
    kills = []
    measure_memory_back(_Readings([0, 200]), lambda: kills.append(1), expected, settle_s=0.01)
    assert kills == [1]
