"""Slots of an engine on a GPU: in its memory, or in pinned memory of the host that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import msgspec
import numpy as np

from kvferry.copy.kernel import CopyKernel
from kvferry.copy.plan import ChunkMap
from kvferry.copy.steps import Step
from kvferry.cuda.device import bound
from kvferry.cuda.memory import host_device_pointer, register_host, unregister_host
from kvferry.cuda.stream import Stream, beside_captures
from kvferry.ipc.shared_memory import Segment
from kvferry.p2p.carriers.pushes.ring import Part, Ring, Wait
from kvferry.p2p.geometry import planes_of
from kvferry.p2p.memory import BlockMemory

_MAX_CTAS = 16  # of gather and scatter: with more of them NCCL's own blocks find no place beside them

Allocate = Callable[[int, int, ExitStack], tuple[int, int]]


def device_slots(device: int, nbytes: int, undo: ExitStack) -> tuple[int, int]:
    """Memory of the GPU: its address, for everybody and for the GPU. Raises CudaError."""
    with bound(device) as drv:
        base = drv.mem_alloc(nbytes)
    undo.callback(_free, device, base)
    return base, base


def pinned_slots(device: int, nbytes: int, undo: ExitStack) -> tuple[int, int]:
    """Pinned memory of the host: its address, and that at which the GPU sees it. Raises CudaError, ShareError."""
    segment = Segment(nbytes)
    memory, base = segment.tensor(), segment.address
    segment.close()  # of the file, which nobody else opens; the tensor keeps the memory
    undo.callback(memory.numel)  # holds it until then
    register_host(base, nbytes, device=device)
    undo.callback(unregister_host, base, device=device)
    return base, host_device_pointer(base, device=device)


class DeviceRing(Ring):
    """Blocks are copied by a kernel, flat memory, of whatever kind, by the driver.

    The thread spoils no CUDA graph that another one captures.
    """

    depth = 2

    def __init__(self, device: int, *, slots: int, slot_bytes: int, allocate: Allocate) -> None:
        """In the thread of `close`'s caller or any other. Raises CudaError, ShareError."""
        self.device = device
        with beside_captures(device), ExitStack() as undo:
            self._kernels = [CopyKernel(device, max_ctas=_MAX_CTAS) for _ in range(self.depth)]
            for kernel in self._kernels:
                undo.callback(kernel.close)
            self._streams = [undo.enter_context(Stream(device)) for _ in self._kernels]
            base, seen_at = allocate(device, slots * slot_bytes, undo)
            self._undo = undo.pop_all()
        self._offset = seen_at - base
        super().__init__([base + slot * slot_bytes for slot in range(slots)], slot_bytes)

    def _copy(self, part: Part, slot: int, *, to_flat: bool) -> Wait:
        # Each in its turn: one whose copy has ended before those of the others began anew.
        kernel, stream = self._kernels.pop(0), self._streams.pop(0)
        self._kernels.append(kernel)
        self._streams.append(stream)
        self._start(part, slot, kernel, stream.handle, to_flat=to_flat)
        return stream.synchronize

    def _start(self, part: Part, slot: int, kernel: CopyKernel, stream: int, *, to_flat: bool) -> None:
        memory = part.memory
        with bound(self.device) as drv:
            if isinstance(memory, BlockMemory):
                plan = _chunk_of(memory, part).plan(memory.ids, np.zeros(1, dtype=np.int64))
                kernel.load(drv, plan, stream=stream)
                step = Step(part.begin, part.end, [])
                kernel.launch(step, staging=slot + self._offset, stream=stream, to_flat=to_flat)
            else:
                address = memory.items[part.item][0] + part.begin
                target, source = (slot, address) if to_flat else (address, slot)
                drv.memcpy_async(target, source, part.end - part.begin, stream)

    def _free(self) -> None:
        with beside_captures(self.device):
            self._undo.close()

    def _around(self) -> AbstractContextManager[None]:
        return beside_captures(self.device)


def _chunk_of(memory: BlockMemory, part: Part) -> ChunkMap:
    """One flat chunk that holds all the blocks, with the pieces of all items as its planes."""
    caches = memory.caches
    layers = caches.layers[part.item : part.item + len(part.pieces)]
    planes = [plane for layer, pieces in zip(layers, part.pieces, strict=True) for plane in planes_of(layer, pieces)]
    bases = [storage.data_ptr() for storage in caches.storages]
    return ChunkMap(msgspec.structs.replace(layers[0], planes=tuple(planes)), bases, len(memory.ids))


def _free(device: int, base: int) -> None:
    with bound(device) as drv:
        drv.mem_free(base)
