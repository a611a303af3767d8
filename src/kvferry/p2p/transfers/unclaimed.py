"""How many transfers nobody has claimed, and how many there may be."""

from __future__ import annotations

from collections import Counter

from kvferry.errors import TransferError
from kvferry.p2p.transfers.outgoing_records import Session

MAX_UNCLAIMED = 8192
_PEER_SHARE = 2  # no peer may have more than one in so many of them


class Unclaimed:
    """For the loop's thread."""

    def __init__(self) -> None:
        self._of: Counter[Session] = Counter()

    @property
    def total(self) -> int:
        return self._of.total()

    def add(self, session: Session) -> None:
        """A transfer was offered over a session."""
        self._of[session] += 1

    def remove(self, session: Session) -> None:
        """It is claimed, or over."""
        self._of[session] -= 1
        if not self._of[session]:
            del self._of[session]

    def problem(self, session: Session) -> TransferError | None:
        """Why there may not be another one over a session; None where there may."""
        if self.total < MAX_UNCLAIMED and self._of[session] < MAX_UNCLAIMED // _PEER_SHARE:
            return None
        return TransferError("too_many", f"{self.total} transfers wait for somebody to claim them")
