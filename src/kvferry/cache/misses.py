"""Why a lookup found less than it asked for: what is remembered of chunks that are not there, and what was counted."""

from __future__ import annotations

import enum

from kvferry.cache.chunk import Space

MAX_NOTES = 1 << 16


class Miss(enum.Enum):
    """What became of the first chunk that a lookup missed.

    GEOMETRY: the same tenant has it for another model, layout or split into ranks. DROPPED: it found no room when it
    was stored. INTEGRITY: its bytes were damaged. FAILED: its store failed. TIMED_OUT: its load from a lower tier had
    not ended when the lookup was answered. NOT_READY: not all ranks of the engine were there. LEASES: it is there, but
    the session has too many leases to get one more.
    """

    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    GEOMETRY = "geometry"
    DROPPED = "dropped"
    INTEGRITY = "integrity"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    NOT_READY = "not_ready"
    LEASES = "leases"


class MissLog:
    """Notes on chunks that are not there, of which the oldest are forgotten, and a counter for each reason."""

    def __init__(self, max_notes: int = MAX_NOTES) -> None:
        self._max_notes = max_notes
        self._notes: dict[tuple[Space, bytes], Miss] = {}
        self._counts = dict.fromkeys(Miss, 0)

    def note(self, space: Space, key: bytes, reason: Miss) -> None:
        """Remember what became of a chunk."""
        self._notes.pop((space, key), None)  # so that it counts as young again
        self._notes[space, key] = reason
        if len(self._notes) > self._max_notes:
            del self._notes[next(iter(self._notes))]

    def forget(self, space: Space, key: bytes) -> None:
        """The chunk is there again, or on its way."""
        self._notes.pop((space, key), None)

    def reason(self, space: Space, key: bytes) -> Miss | None:
        """What is remembered of a chunk."""
        return self._notes.get((space, key))

    def count(self, reason: Miss) -> None:
        """A lookup has missed."""
        self._counts[reason] += 1

    def values(self) -> dict[str, float]:
        """The counters by name."""
        return {f"misses_{reason.value}": count for reason, count in self._counts.items()}
