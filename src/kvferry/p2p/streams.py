"""Where an engine's streams are: what was queued before a call has to be done before blocks are read or written."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A CUDA event, as torch has it."""

    def query(self) -> bool:
        """Whether what was queued before it is done."""


def mark(device: torch.device) -> Event | None:
    """The end of what is queued on the device's current stream now; None on the host, where nothing is."""
    if device.type != "cuda":
        return None
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined]
    return event
