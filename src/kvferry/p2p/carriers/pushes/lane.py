"""What exchanges slots with the peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

Range = tuple[int, int]


class Lane(Protocol):
    """One direction of a session; `kvferry.p2p.nccl.Communicator` is one. For any thread; nothing waits.

    It has a thread, in which the callbacks of its futures run, too.
    """

    def exchange(
        self, *, sends: Sequence[Range] = (), receives: Sequence[Range] = (), timeout_s: float
    ) -> Future[None]:
        """Send, or receive, ranges (address, bytes), in the order of the calls, which is the same on both sides."""

    def call(self, task: Callable[[], None]) -> None:
        """Have the lane's thread call it, after what it was given before; also once the lane has been aborted."""

    def abort(self, reason: str) -> Future[Any]:
        """The session has ended: what is under way fails, once nothing touches its memory any more."""
