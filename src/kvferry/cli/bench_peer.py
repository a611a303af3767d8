"""The other process of `kvferry bench ipc`: it maps what the bench shares, and reads it."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from kvferry import ipc
from kvferry.ipc.table import process_table
from kvferry.reference.process import answer_lines

__all__ = ["Connect", "Drop", "Exit", "Map", "Peer", "Read"]


class _Command(msgspec.Struct, frozen=True, tag_field="command", tag=str.lower, forbid_unknown_fields=True):
    """One line from the bench."""


class Connect(_Command, frozen=True):
    """Connect to the bench's socket and get the device ready."""

    path: str
    device: str


class Map(_Command, frozen=True):
    """Receive wrappers and map them all. Replies finished_ns (monotonic), opens."""


class Read(_Command, frozen=True):
    """Copy the first mapped tensor to local memory. Replies mapped_s, local_s."""

    repeats: int


class Drop(_Command, frozen=True):
    """Unmap everything."""


class Exit(_Command, frozen=True):
    """End."""


class Peer:
    """What is mapped, and the socket that it came by."""

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._socket: socket.socket | None = None
        self._device = "cpu"
        self._wrappers: list[ipc.DeviceIPCWrapper] = []
        self._tensors: list[torch.Tensor] = []
        self._handlers: dict[type[_Command], Callable[[Any], dict[str, Any]]] = {
            Connect: self._connect,
            Map: self._map,
            Read: self._read,
            Drop: lambda _: self._drop(),
            Exit: lambda _: self._drop(),
        }

    def handle(self, command: _Command) -> dict[str, Any]:
        return self._handlers[type(command)](command)

    def close(self) -> None:
        self._drop()
        self._resources.close()

    def _connect(self, command: Connect) -> dict[str, Any]:
        self._socket = self._resources.enter_context(socket.socket(socket.AF_UNIX))
        self._socket.settimeout(30)
        self._socket.connect(command.path)
        self._device = command.device
        torch.zeros(1, device=command.device)
        return {}

    def _map(self, command: Map) -> dict[str, Any]:
        assert self._socket is not None
        opens = process_table().mappings.stats().opens
        self._wrappers = ipc.recv(self._socket)
        self._tensors = [wrapper.to_tensor() for wrapper in self._wrappers]
        finished = time.monotonic_ns()
        return {"finished_ns": finished, "opens": process_table().mappings.stats().opens - opens}

    def _read(self, command: Read) -> dict[str, Any]:
        mapped = self._tensors[0]
        local, target = torch.ones_like(mapped), torch.empty_like(mapped)

        def copy_time_s(source: torch.Tensor) -> float:
            started = time.perf_counter()
            target.copy_(source)
            if target.is_cuda:
                torch.cuda.synchronize(target.device)
            return time.perf_counter() - started

        copy_time_s(mapped), copy_time_s(local)
        times = [(copy_time_s(mapped), copy_time_s(local)) for _ in range(command.repeats)]
        mapped_s, local_s = (statistics.median(column) for column in zip(*times, strict=True))
        return {"mapped_s": mapped_s, "local_s": local_s}

    def _drop(self) -> dict[str, Any]:
        self._tensors = []
        for wrapper in self._wrappers:
            wrapper.close()
        self._wrappers = []
        process_table().mappings.drain(30)
        return {}


def main() -> None:
    peer = Peer()
    try:
        answer_lines(Connect | Map | Read | Drop | Exit, peer.handle, Exit)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
