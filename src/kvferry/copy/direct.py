"""Copies of paged blocks to and from where they belong, by a GPU's copy engine alone.

No kernel runs, so the GPU has no reason to take its multiprocessors from an engine in another process and give them to
this one, time slice by time slice. Blocks of some size are copied as fast as one big copy (benchmarks/results), as long
as the next ones are handed over in time: 8 MiB take the engine 0.15 ms. So addresses are worked out for many steps at
once, while earlier steps are under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.copy.copier import Steps
from kvferry.copy.plan import CopyPlan
from kvferry.copy.staging import drain_event
from kvferry.copy.strips import Int64s
from kvferry.cuda.device import bound
from kvferry.cuda.driver import Driver
from kvferry.cuda.stream import Event, Stream

_Bools: TypeAlias = npt.NDArray[np.bool_]

MIN_RUN_BYTES = 32 << 10  # below this the copy engine's time is lost between blocks
_STEP_BYTES = 16 << 20
BATCH_ROWS = 256  # a call with more of them is slower
_AHEAD = 4  # steps that may be under way
_FIRST_PART_BYTES = 8 << 20
_PART_BYTES = 64 << 20


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
        number = 0
        try:
            for start, part in parts_of(plan):
                rows = runs_of(part, to_flat=to_flat)
                a_step = min(BATCH_ROWS, max(1, _STEP_BYTES // int(rows[2].max(initial=1))))
                for first in range(0, rows.shape[1], a_step):
                    yield start * plan.chunks.chunk_bytes
                    self._submit(number, rows, first, min(first + a_step, rows.shape[1]))
                    number += 1
        finally:
            with bound(self.device) as drv:
                drain_event(drv, self._events[number % _AHEAD].handle, self._stream.handle)

    def close(self) -> None:
        """Give everything back, once nothing is under way; idempotent."""
        self._undo.close()

    def _submit(self, number: int, rows: Int64s, first: int, stop: int) -> None:
        """Put step `number` into the stream, once the one `_AHEAD` before it is done."""
        event = self._events[number % _AHEAD].handle
        with bound(self.device) as drv:
            drv.event_synchronize(event)
            copy_batch(drv, rows, first, stop, stream=self._stream.handle)
            drv.event_record(event, self._stream.handle)


def copy_batch(drv: Driver, rows: Int64s, first: int, stop: int, *, stream: int) -> None:
    """Put copies `first` to `stop` of three contiguous rows (targets, sources, bytes) into the stream, as one call."""
    row_bytes, item_bytes = rows.strides
    targets = rows.ctypes.data + first * item_bytes
    drv.memcpy_batch_async((targets, targets + row_bytes, targets + 2 * row_bytes), stop - first, stream)


def mean_run_bytes(plan: CopyPlan) -> float:
    """How many bytes of a plan lie side by side on both of its sides, on average."""
    _, strides, lengths, _ = plan.chunks.planes
    pieces = int((plan.ids >= 0).sum())
    joined = int(_follows(plan).sum())
    runs = pieces * len(lengths) - joined * int((strides == lengths).sum())
    return pieces * int(lengths.sum()) / runs if runs else 0.0


def parts_of(plan: CopyPlan) -> Iterator[tuple[int, CopyPlan]]:
    """The plan cut into parts of whole chunks, and the number of each one's first chunk. The first is small."""
    start, size = 0, _FIRST_PART_BYTES
    while start < len(plan.flats):
        stop = start + max(1, size // plan.chunks.chunk_bytes)
        yield start, plan.part(start, stop)
        start, size = stop, _PART_BYTES


def runs_of(plan: CopyPlan, *, to_flat: bool) -> Int64s:
    """What to copy: one column (target, source, bytes) for all that lies side by side in a plane. None of no bytes."""
    starts, strides, lengths, places = plan.chunks.planes[:, :, None]
    ids = plan.ids[:, None, :]
    rows = np.empty((3, len(ids), len(starts), plan.chunks.blocks), dtype=np.int64)
    flat, paged = rows[:2] if to_flat else rows[1::-1]
    np.multiply(ids, strides, out=paged)
    paged += starts
    np.add(plan.flats[:, None, None], places + np.arange(plan.chunks.blocks) * lengths, out=flat)
    rows[2] = lengths
    follows = _follows(plan)
    if follows.any():
        return _merged(rows, follows[:, None, :] & (strides == lengths), ids >= 0)
    columns = rows.reshape(3, -1)
    if plan.skips:
        columns = columns[:, np.broadcast_to(ids >= 0, rows.shape[1:]).ravel()]
    return np.ascontiguousarray(columns)  # the driver takes each row as a list


def _merged(rows: Int64s, follows: _Bools, copied: _Bools) -> Int64s:
    """The columns with each run as one; `follows` says for all blocks but the first whether they go on with a run."""
    heads = np.ones(rows.shape[1:], dtype=bool)
    heads[:, :, 1:] = ~follows
    at = np.flatnonzero(heads)
    rows[2] *= copied
    columns = rows.reshape(3, -1)
    merged = columns[:, at]
    merged[2] = np.add.reduceat(columns[2], at)
    return np.ascontiguousarray(merged[:, merged[2] > 0])


def _follows(plan: CopyPlan) -> _Bools:
    """For each block of a chunk but the first: whether it is the next of the cache after the one before it."""
    ids = plan.ids
    follows: _Bools = (ids[:, 1:] == ids[:, :-1] + 1) & (ids[:, :-1] >= 0)
    return follows
