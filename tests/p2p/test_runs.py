"""Byte runs: any part of them, as buffers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.p2p.carriers.runs import MAX_BUFFERS, ByteRuns


@given(
    runs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=40),
    position=st.floats(0, 1),
    nbytes=st.integers(0, 500),
)
def test_any_part(runs: list[tuple[int, int]], position: float, nbytes: int) -> None:
    """Gaps of 0 bytes make runs that touch."""
    memory = np.random.default_rng(1).integers(0, 256, 4000, dtype=np.uint8)
    starts, lengths, at = [], [], 0
    for gap, length in runs:
        starts.append(at + gap)
        lengths.append(length)
        at += gap + length
    addresses = np.array(starts, dtype=np.int64) + memory.ctypes.data
    made = ByteRuns(addresses, np.array(lengths, dtype=np.int64), memory)
    whole = b"".join(memory[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True))
    assert made.nbytes == len(whole)
    first = int(position * len(whole))
    assert b"".join(made.buffers(first, nbytes)) == whole[first : first + nbytes]
    part = made.part(first, min(first + nbytes, len(whole)))
    assert b"".join(part.buffers(0, part.nbytes)) == whole[first : first + nbytes]
    rows = made.rows_from(1000)
    assert rows[:, 2].sum() == len(whole)
    assert [row[1] for row in rows.tolist()] == [1000 + int(rows[:number, 2].sum()) for number in range(len(rows))]


def test_no_more_buffers_than_a_system_call_takes() -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    addresses = memory.ctypes.data + np.arange(0, 4096, 2, dtype=np.int64)
    runs = ByteRuns(addresses, np.ones(2048, dtype=np.int64), memory)
    assert len(runs.buffers(0, 4096)) == MAX_BUFFERS
    assert len(runs.buffers(2047, 4096)) == 1
    assert runs.buffers(2048, 10) == []


def test_nothing_at_all() -> None:
    assert ByteRuns.single(0, 0, None).nbytes == 0
    assert ByteRuns.single(0, 0, None).buffers(0, 5) == []
