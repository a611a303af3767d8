"""Copies of paged blocks to and from where they belong, by a GPU's copy engine alone.

No kernel runs, so the GPU has no reason to take its multiprocessors from an engine in another process and give them to
this one, time slice by time slice. Blocks of some size are copied as fast as one big copy (benchmarks/results).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from kvferry.copy.copier import Steps
from kvferry.copy.plan import CopyPlan, Int64s
from kvferry.copy.staging import drain_event
from kvferry.cuda.device import bound
from kvferry.cuda.stream import Event, Stream

MIN_RUN_BYTES = 32 << 10  # below this the copy engine's time is lost between blocks
_STEP_BYTES = 8 << 20
_AHEAD = 4  # steps that may be under way


class DirectCopies:
    """One stream, and an event for each step that may be under way. For one thread at a time."""

    def __init__(self, device: int) -> None:
        self.device = device
        with ExitStack() as undo:
            self._stream = undo.enter_context(Stream(device))
            self._events = [undo.enter_context(Event(device)) for _ in range(_AHEAD)]
            self._undo = undo.pop_all()

    def steps(self, plan: CopyPlan, *, to_flat: bool) -> Steps:
        """See `Copier.steps`; `plan` is in order."""
        chunks_a_step = max(1, _STEP_BYTES // plan.chunks.chunk_bytes)
        number = 0
        try:
            for start in range(0, len(plan.flats), chunks_a_step):
                part = plan.part(start, start + chunks_a_step)
                for rows in cut_rows(runs_of(part, to_flat=to_flat)):
                    yield start * plan.chunks.chunk_bytes
                    self._submit(number, rows)
                    number += 1
        finally:
            with bound(self.device) as drv:
                drain_event(drv, self._events[number % _AHEAD].handle, self._stream.handle)

    def close(self) -> None:
        """Give everything back, once nothing is under way; idempotent."""
        self._undo.close()

    def _submit(self, number: int, rows: Int64s) -> None:
        """Put step `number` into the stream, once the one `_AHEAD` before it is done."""
        lists = np.ascontiguousarray(rows.T)
        event = self._events[number % _AHEAD].handle
        with bound(self.device) as drv:
            drv.event_synchronize(event)
            targets = lists.ctypes.data
            places = (targets, targets + lists.strides[0], targets + 2 * lists.strides[0])
            drv.memcpy_batch_async(places, len(rows), self._stream.handle)
            drv.event_record(event, self._stream.handle)


def mean_run_bytes(plan: CopyPlan) -> float:
    """How many bytes of a plan lie side by side on both of its sides, on average."""
    _, strides, lengths, _ = plan.chunks.planes
    pieces = int((plan.ids >= 0).sum())
    joined = int(_follows(plan).sum())
    runs = pieces * len(lengths) - joined * int((strides == lengths).sum())
    return pieces * int(lengths.sum()) / runs if runs else 0.0


def runs_of(plan: CopyPlan, *, to_flat: bool) -> Int64s:
    """The plan's rows (target, source, bytes) without those of no bytes; neighbours in a plane are one row."""
    rows = plan.rows(to_flat=to_flat)
    _, strides, lengths, _ = plan.chunks.planes
    first = np.ones((len(plan.ids), len(lengths), plan.chunks.blocks), dtype=bool)
    first[:, :, 1:] = ~(_follows(plan)[:, None, :] & (strides == lengths)[None, :, None])
    starts = np.flatnonzero(first)
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return merged[merged[:, 2] > 0]


def cut_rows(rows: Int64s) -> Iterator[Int64s]:
    """The rows in parts of at most `_STEP_BYTES`, or of one row."""
    ends = np.cumsum(rows[:, 2])
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _STEP_BYTES, side="right")))
        yield rows[start:stop]
        start = stop


def _follows(plan: CopyPlan) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """For each block of a chunk but the first: whether it is the next of the cache after the one before it."""
    ids = plan.ids
    follows: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (ids[:, 1:] == ids[:, :-1] + 1) & (ids[:, :-1] >= 0)
    return follows
