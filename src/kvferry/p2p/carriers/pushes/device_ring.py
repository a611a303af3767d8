"""Slots in pinned memory of the host, which a GPU reads and writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from kvferry.cuda.memory import host_device_pointer, register_host, unregister_host
from kvferry.cuda.stream import beside_captures
from kvferry.ipc.shared_memory import Segment
from kvferry.p2p.carriers.pushes.gpu_copies import GpuCopies, prepare
from kvferry.p2p.carriers.pushes.ring import Ring, Wait
from kvferry.p2p.carriers.pushes.run import Part, Run


class DeviceRing(Ring):
    """Its thread spoils no CUDA graph that another one captures."""

    depth = 2

    def __init__(self, device: int, *, slots: int, slot_bytes: int) -> None:
        """In the thread of `close`'s caller or any other. Raises CudaError, ShareError."""
        self._device = device
        with beside_captures(device), ExitStack() as undo:
            base, seen_at = _pinned(device, slots * slot_bytes, undo)
            self._copies = [GpuCopies(device, offset=seen_at - base) for _ in range(self.depth)]
            for copies in self._copies:
                undo.callback(copies.close)
            self._undo = undo.pop_all()
        super().__init__(tuple(base + slot * slot_bytes for slot in range(slots)), slot_bytes)

    def prepare(self, run: Run) -> None:
        """The plan of what the kernel is to copy."""
        prepare(run)

    def _copy(self, part: Part, slot: int, *, to_flat: bool) -> Wait:
        # Each in its turn: one whose copy has ended before those of the others began anew.
        copies = self._copies.pop(0)
        self._copies.append(copies)
        copies.start(part, slot, to_flat=to_flat)
        return copies.stream.synchronize

    def _free(self) -> None:
        with beside_captures(self._device):
            self._undo.close()

    def _around(self) -> AbstractContextManager[None]:
        return beside_captures(self._device)


def _pinned(device: int, nbytes: int, undo: ExitStack) -> tuple[int, int]:
    """Memory of the host: its address, and that at which the GPU sees it. Raises CudaError, ShareError."""
    segment = Segment(nbytes)
    memory, base = segment.tensor(), segment.address
    segment.close()  # of the file, which nobody else opens; the tensor keeps the memory
    undo.callback(memory.numel)  # holds it until then
    register_host(base, nbytes, device=device)
    undo.callback(unregister_host, base, device=device)
    return base, host_device_pointer(base, device=device)
