"""Where an engine's streams are: what was queued before a call has to be done before blocks are read or written."""

from __future__ import annotations

from typing import Protocol

import torch

from kvferry.cuda.stream import beside_captures


class Event(Protocol):
    """A point in a stream, which has a number."""

    @property
    def stream(self) -> int: ...

    def query(self) -> bool:
        """Whether what was queued before it is done."""


class _Mark:
    """An event that may be asked while another thread captures a CUDA graph."""

    def __init__(self, device: int, stream: int, event: torch.cuda.Event) -> None:
        self.stream = stream
        self._device = device
        self._event = event

    def query(self) -> bool:
        with beside_captures(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


def mark(device: torch.device) -> Event | None:
    """The end of what is queued on the device's current stream now; None on the host, where nothing is."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return _Mark(stream.device_index, stream.cuda_stream, stream.record_event())
