"""Copies from the receive buffer into blocks, away from the loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from kvferry.copy.streaming import row_copier
from kvferry.errors import TransferError
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.memory import BlockMemory, Memory
from kvferry.p2p.receive.device import DeviceRows
from kvferry.p2p.receive.store import Place

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
_END_S = 30.0
_STEP_ROWS = 4096

OnDone = Callable[[TransferError | None], None]


class Copies:
    """Runs `kvferry-p2p-copies`: one copy after the other, in host memory, with `device` from and to a GPU's, too."""

    def __init__(self, device: int | None = None) -> None:
        """Raises CudaError."""
        self._jobs: queue.SimpleQueue[tuple[Sequence[tuple[int, ByteRuns]], OnDone] | None] = queue.SimpleQueue()
        self._of_device = None if device is None else DeviceRows(device)
        self._copy_rows = row_copier() if self._of_device is None else self._of_device.copy_rows
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-copies", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def copy(self, items: Sequence[tuple[int, ByteRuns]], on_done: OnDone) -> None:
        """Copy from each address into its runs, then call `on_done` in this thread."""
        self._jobs.put((items, on_done))

    def close(self) -> None:
        """End the thread after what was queued. Idempotent."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._of_device is not None and not self._thread.is_alive():
            self._of_device.close()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            if job is None:
                return
            self._do(*job)

    def _do(self, items: Sequence[tuple[int, ByteRuns]], on_done: OnDone) -> None:
        error = None
        try:
            for address, runs in items:
                rows = runs.rows_from(address)
                for start in range(0, len(rows), _STEP_ROWS):
                    self._copy_rows(rows[start : start + _STEP_ROWS])
        except Exception as problem:  # noqa: BLE001 - whoever waits must be told
            _LOG.exception("a copy out of the receive buffer failed")
            error = TransferError("failed", f"the copy out of the receive buffer failed: {problem!r}")
        on_done(error)


def copies_of(place: Place, destination: Memory, skip_blocks: int) -> list[tuple[int, ByteRuns]]:
    """What is copied from a place, but for its first blocks: in it all blocks of one piece lie before the next's."""
    found = []
    for item, (address, nbytes) in enumerate(place.memory.items):
        if not isinstance(destination, BlockMemory):
            found.append((address, destination.runs(item, ())))
            continue
        pieces = place.session.pieces(item)
        num_blocks = nbytes // sum(piece.length for piece in pieces)
        for piece in pieces:
            found.append((address + skip_blocks * piece.length, destination.runs(item, (piece,))))
            address += num_blocks * piece.length
    return found
