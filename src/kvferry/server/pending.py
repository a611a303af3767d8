"""Lookups that wait for what lower tiers are loading for them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.protocol.messages import Lookup
from kvferry.server.session import Session
from kvferry.server.tiers.fetches import Fetch
from kvferry.server.tiers.room import WaitingRoom

MAX_PENDING = 1024  # of one session
MAX_KEY_BYTES = 64 << 20  # of all that wait
_SLACK = 64


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A lookup that is not answered yet, and the fetches that it asked for, by rank."""

    session: Session
    message: Lookup
    fetches: Mapping[int, Fetch]
    num_open: int
    ended: bool = False


class PendingLookups:
    """Answers each lookup once: when all its fetches have ended, or its time is over. Belongs to the loop thread.

    Parameters
    ----------
    answer
        Sends the answer.
    """

    def __init__(self, answer: Callable[[PendingLookup], None]) -> None:
        self._answer = answer
        self._sessions: dict[Session, dict[PendingLookup, None]] = {}
        self._deadlines: list[tuple[float, int, PendingLookup]] = []  # the next one first; some have ended already
        self._ties = itertools.count()
        self._num_open = 0
        self._key_bytes = WaitingRoom(MAX_KEY_BYTES)

    def __len__(self) -> int:
        return self._num_open

    def add(self, session: Session, message: Lookup, fetches: Mapping[int, Fetch], deadline: float) -> bool:
        """Have a lookup answered later; False where too much of the session's, its tenant's or all waits already."""
        num_waiting = len(self._sessions.get(session, ()))
        if num_waiting >= MAX_PENDING or not self._key_bytes.fits(session.tenant, len(message.keys)):
            return False
        pending = PendingLookup(session, message, fetches, len(fetches))
        self._sessions.setdefault(session, {})[pending] = None
        self._key_bytes.enter(session.tenant, len(message.keys))
        self._num_open += 1
        heapq.heappush(self._deadlines, (deadline, next(self._ties), pending))
        if len(self._deadlines) > 2 * self._num_open + _SLACK:  # most have ended long before their time
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
        for fetch in fetches.values():
            fetch.on_end(lambda: self._on_fetched(pending))
        return True

    def drop(self, session: Session) -> None:
        """The session has ended: nobody waits for its answers."""
        for pending in self._sessions.pop(session, ()):
            self._close(pending)

    def tick(self, now: float) -> None:
        """Answer those whose time is over."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].ended):
            self._end(heapq.heappop(self._deadlines)[2])

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return self._deadlines[0][0] if self._deadlines else None

    def _on_fetched(self, pending: PendingLookup) -> None:
        pending.num_open -= 1
        if not pending.num_open:
            self._end(pending)

    def _end(self, pending: PendingLookup) -> None:
        if pending.ended:
            return
        self._close(pending)
        waiting = self._sessions[pending.session]
        del waiting[pending]
        if not waiting:
            del self._sessions[pending.session]
        self._answer(pending)

    def _close(self, pending: PendingLookup) -> None:
        pending.ended = True
        self._num_open -= 1
        self._key_bytes.leave(pending.session.tenant, len(pending.message.keys))
