"""The watch over memory that comes back."""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest

from kvferry.cli.memory_back import HostHeld, measure_memory_back

_T = TypeVar("_T")
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
    """Memory with prepared readings, one for each look, and then the last for ever."""

    def __init__(self, mib: Iterable[int], num_mib: int = 100, referred_to: Iterable[bool | None] = (None,)) -> None:
        self.num_bytes = num_mib * MIB
        self._free = _for_ever(mib)
        self._referred_to = _for_ever(referred_to)

    def free_bytes(self) -> int:
        return next(self._free) * MIB

    def is_referred_to(self) -> bool | None:
        return next(self._referred_to)


def _for_ever(values: Iterable[_T]) -> Iterator[_T]:
    values = list(values)
    return itertools.chain(values, itertools.repeat(values[-1]))


def test_a_part_that_comes_first_is_not_taken_for_the_whole() -> None:
    """100 MiB are waited for; 120 of something else come first, the 100 only later."""
    back = measure_memory_back(_Readings([1000] + [1120] * 100 + [1220]), lambda: None, settle_s=0.2)
    assert back.num_bytes == 220 * MIB
    assert back.ms is not None
    assert back.ms > 100 * 0.2


def test_memory_that_does_not_come_back_has_no_time() -> None:
    held = _Readings([10, 10, 60], referred_to=[True])
    assert measure_memory_back(held, lambda: None, timeout_s=0.1) == (None, 50 * MIB, "free")


def test_memory_that_a_bystander_frees_is_not_taken_for_it() -> None:
    held = _Readings([0, 200], referred_to=[True] * 11 + [False])
    back = measure_memory_back(held, lambda: None, settle_s=0.001)
    assert back.ms is not None
    assert back.ms >= 10 * 2


def test_free_bytes_alone_decide_where_nobody_tells_of_references() -> None:
    assert measure_memory_back(_Readings([0, -300]), lambda: None, timeout_s=1.2, settle_s=0.01).ms is None


def test_where_a_bystander_takes_memory_the_last_reference_tells() -> None:
    back = measure_memory_back(_Readings([0, -300], referred_to=[True, True, False]), lambda: None, settle_s=0.01)
    assert back.seen == "unreferenced"
    assert back.ms is not None
    assert 2 <= back.ms < 100


def test_a_killed_process_gives_its_memfd_back() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        held = HostHeld([holder.pid])
        assert held.num_bytes == 64 * MIB
        back = measure_memory_back(held, holder.kill, settle_s=0.05)
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
            with mmap.mmap(kept, 64 * MIB, access=mmap.ACCESS_READ):
                held = HostHeld([holder.pid, os.getpid()])
                back = measure_memory_back(held, holder.kill, timeout_s=0.3, settle_s=0.05)
        finally:
            os.close(kept)
    assert back.ms is None


@pytest.mark.parametrize("num_mib", [0, 100])
def test_the_kill_happens_once_and_first(num_mib: int) -> None:
    kills = []
    measure_memory_back(_Readings([0, 200], num_mib), lambda: kills.append(1), settle_s=0.01)
    assert kills == [1]
