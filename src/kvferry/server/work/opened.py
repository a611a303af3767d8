"""An engine's KV cache as the worker holds it: imported wrappers, their tensors, their addresses, its events."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.copy import ChunkMap, CopyPlan
from kvferry.errors import KVFerryError, LayoutError, WireError
from kvferry.ipc.events import PeerEvents, open_events
from kvferry.ipc.wire import decode_descriptors, fd_slots
from kvferry.protocol.messages import NONCE_BYTES
from kvferry.server.work.tasks import CopyTask, OpenTask


class OpenedCache:
    """Opens in steps: made, then `take_fds` until `complete`, then `finish`. `close` at any time. One thread.

    Raises what decoding and checking raise (WireError, LayoutError); nothing is open then.
    """

    def __init__(self, task: OpenTask) -> None:
        self.layout = task.layout
        self._wrappers = decode_descriptors(task.wrappers)
        self._probes = task.probes or (0,) * len(self._wrappers)
        try:
            self._slots = deque(fd_slots(self._wrappers))
            self._check(task)
        except BaseException:
            self.close_wrappers()
            raise
        self._events_data = task.events
        self._num_event_fds = task.num_event_fds
        self._event_fds: list[int] = []
        self.received = 0
        self._tensors: list[torch.Tensor] = []
        self._bases: list[int] = []
        self._chunks: ChunkMap | None = None  # for as many blocks a chunk as the last task had
        self.events: PeerEvents | None = None

    @property
    def complete(self) -> bool:
        """Whether all descriptors have come."""
        return not self._slots and len(self._event_fds) == self._num_event_fds

    def take_fds(self, fds: Sequence[int]) -> None:
        """Import the next descriptors; owns all of them, also on error."""
        left = list(fds)
        try:
            if len(left) > len(self._slots) + self._num_event_fds - len(self._event_fds):
                raise WireError(f"{len(left)} file descriptors more than the registration announced")
            while left and self._slots:
                wrapper, index = self._slots.popleft()
                wrapper.import_fd(index, left.pop(0))
            self._event_fds += left
            left = []
        finally:
            for fd in left:
                os.close(fd)
        self.received += len(fds)

    def finish(self) -> tuple[bytes, ...]:
        """Map everything; what each storage holds at its probe."""
        self._tensors = [wrapper.to_tensor() for wrapper in self._wrappers]
        self._bases = [tensor.data_ptr() for tensor in self._tensors]
        if self._events_data:
            fds, self._event_fds = self._event_fds, []
            self.events = open_events(self._events_data, fds)
        return tuple(
            tensor[probe : probe + NONCE_BYTES].cpu().numpy().tobytes()
            for tensor, probe in zip(self._tensors, self._probes, strict=True)
        )

    def plan(self, task: CopyTask, pool_address: int) -> CopyPlan:
        """What a task copies. Raises BlockIdError unless all its blocks are there and none is named twice."""
        ids = np.frombuffer(task.block_ids, dtype="<i4")
        blocks = len(ids) // len(task.offsets)
        if self._chunks is None or self._chunks.blocks != blocks:
            self._chunks = ChunkMap(self.layout, self._bases, blocks)
        return self._chunks.plan(ids, np.asarray(task.offsets, dtype=np.int64) + pool_address, task.skip_blocks)

    def storage_names(self) -> str:
        """What is mapped, for people."""
        return ", ".join(map(repr, self._wrappers))

    def close(self) -> list[KVFerryError]:
        """Let go of everything, whatever fails on the way; what failed. Idempotent."""
        errors: list[KVFerryError] = []
        events, self.events = self.events, None
        if events is not None:
            try:
                events.close()
            except KVFerryError as error:
                errors.append(error)
        fds, self._event_fds = self._event_fds, []
        for fd in fds:
            os.close(fd)
        self._tensors.clear()
        return errors + self.close_wrappers()

    def close_wrappers(self) -> list[KVFerryError]:
        """Close the wrappers, whatever fails on the way; what failed."""
        errors: list[KVFerryError] = []
        for wrapper in self._wrappers:
            try:
                wrapper.close()
            except KVFerryError as error:
                errors.append(error)
        self._wrappers = []
        return errors

    def _check(self, task: OpenTask) -> None:
        if len(self._slots) != task.num_fds:
            raise WireError(f"the wrappers need {len(self._slots)} file descriptors, {task.num_fds} were announced")
        for wrapper in self._wrappers:
            if wrapper.device_uuid != task.device_uuid:
                raise LayoutError(
                    f"storages on {wrapper.device_uuid or 'the host'} and {task.device_uuid or 'the host'}; "
                    "one registration covers one device"
                )
            if wrapper.dtype is not torch.uint8 or len(wrapper.shape) != 1 or wrapper.stride != (1,):
                raise LayoutError(f"{wrapper!r} is no storage; each is one dense run of uint8")
        sizes = [wrapper.shape[0] for wrapper in self._wrappers]
        if len(self._probes) != len(sizes) or any(
            probe >= size for probe, size in zip(self._probes, sizes, strict=True)
        ):
            raise WireError(f"probes at {self._probes[:8]} of {len(sizes)} storages that have {sizes[:8]} bytes")
        self.layout.validate(sizes)
