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


class Use:
    """Who uses what is lent: `stream` is the CUDA stream on which that is done, None on the host."""

    stream: torch.cuda.Stream | None = None


class _Mark:
    """An event that may be asked while another thread captures a CUDA graph."""

    def __init__(self, device: int, stream: int, event: torch.cuda.Event) -> None:
        self.stream = stream
        self._device = device
        self._event = event

    def query(self) -> bool:
        with beside_captures(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """That of the calling thread; None on the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def mark(device: torch.device) -> Event | None:
    """The end of what is queued on the device's current stream now; None on the host, where nothing is."""
    stream = current_stream(device)
    return None if stream is None else _marked(stream)


def mark_in(stream: torch.cuda.Stream | None) -> Event | None:
    """The same for a stream of another thread's."""
    if stream is None:
        return None
    with beside_captures(stream.device_index):
        return _marked(stream)


def _marked(stream: torch.cuda.Stream) -> Event:
    return _Mark(stream.device_index, stream.cuda_stream, stream.record_event())
