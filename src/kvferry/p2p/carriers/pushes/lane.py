"""What exchanges slots with the peer's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

Range = tuple[int, int]


class Lane(Protocol):
    """One direction of a session; `kvferry.p2p.nccl.Communicator` is one. For any thread; nothing waits."""

    def exchange(
        self, *, sends: Sequence[Range] = (), receives: Sequence[Range] = (), timeout_s: float
    ) -> Future[None]:
        """Send, or receive, ranges (address, bytes), in the order of the calls, which is the same on both sides."""

    def abort(self, reason: str) -> Future[Any]:
        """The session has ended: what is under way fails, once nothing touches its memory any more."""
