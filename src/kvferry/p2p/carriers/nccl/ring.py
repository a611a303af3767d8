"""The slots through which all goes, and the thread that fills and empties them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.copy.kernel import CopyKernel
from kvferry.copy.plan import ChunkMap
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.stream import Stream, beside_captures
from kvferry.p2p.geometry import Piece, planes_of
from kvferry.p2p.memory import BlockMemory

_LOG = logging.getLogger(__name__)
_MAX_CTAS = 16  # of gather and scatter: with more of them NCCL's own blocks find no place beside them
_IDLE_S = 1.0
_END_S = 20.0

Call = Callable[[], None]
OnDone = Callable[[Exception | None], None]


class Part(NamedTuple):
    """Bytes `begin` to `end` of one layer of some blocks; all blocks of the first piece come first."""

    memory: BlockMemory
    layer: int
    pieces: tuple[Piece, ...]
    begin: int
    end: int


class Ring:
    """`slots` slots of `slot_bytes` bytes of device memory, allocated once. Runs `kvferry-p2p-ring`.

    That thread alone makes the driver calls of copies, one after the other, and spoils no CUDA graph that another one
    captures. It calls `on_done` when the bytes are there.
    """

    def __init__(self, device: int, *, slots: int, slot_bytes: int) -> None:
        """Allocates; in the thread of `close`'s caller or any other. Raises CudaError."""
        self.device = device
        self.slot_bytes = slot_bytes
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        with beside_captures(device), ExitStack() as undo:
            self._kernel = CopyKernel(device, max_ctas=_MAX_CTAS)
            undo.callback(self._kernel.close)
            self._stream = undo.enter_context(Stream(device))
            with bound(device) as drv:
                self._base = drv.mem_alloc(slots * slot_bytes)
            undo.callback(self._free)
            self._undo = undo.pop_all()
        self.addresses = tuple(self._base + slot * slot_bytes for slot in range(slots))
        self._thread = threading.Thread(target=self._run, name="kvferry-p2p-ring", daemon=True)
        self._thread.start()

    def gather(self, part: Part, slot: int, on_done: OnDone) -> None:
        """Copy from the blocks into the slot at that address."""
        self._jobs.put(lambda: self._copy(part, slot, on_done, to_flat=True))

    def scatter(self, part: Part, slot: int, on_done: OnDone) -> None:
        """Copy from the slot at that address into the blocks."""
        self._jobs.put(lambda: self._copy(part, slot, on_done, to_flat=False))

    def close(self) -> None:
        """End the thread after what was queued, and free all. Nobody else may use the slots any more. Idempotent."""
        self._jobs.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _LOG.error("the copies of the NCCL ring on device %d did not end within %g s", self.device, _END_S)
            return
        with beside_captures(self.device):
            self._undo.close()

    def _run(self) -> None:
        with beside_captures(self.device):
            while True:
                try:
                    job = self._jobs.get(timeout=_IDLE_S)
                except queue.Empty:
                    continue
                if job is None:
                    return
                job()

    def _copy(self, part: Part, slot: int, on_done: OnDone, *, to_flat: bool) -> None:
        error: Exception | None = None
        try:
            chunks = _chunk_of(part)
            plan = chunks.plan(part.memory.ids, np.zeros(1, dtype=np.int64))
            with bound(self.device) as drv:
                self._kernel.load(drv, plan, stream=self._stream.handle)
                step = Step(part.begin, part.end, [])
                self._kernel.launch(step, staging=slot, stream=self._stream.handle, to_flat=to_flat)
            self._stream.synchronize()
        except Exception as problem:  # noqa: BLE001 - whoever waits must be told
            _LOG.exception("a copy of the NCCL ring failed")
            error = problem
        on_done(error)

    def _free(self) -> None:
        with bound(self.device) as drv:
            drv.mem_free(self._base)


def _chunk_of(part: Part) -> ChunkMap:
    """One flat chunk that holds all the blocks, with the pieces as its planes."""
    caches = part.memory.caches
    layer = caches.layers[part.layer]
    bases = [storage.data_ptr() for storage in caches.storages]
    cut = msgspec.structs.replace(layer, planes=planes_of(layer, part.pieces))
    return ChunkMap(cut, bases, len(part.memory.ids))
