"""Why peers, and registrations, were refused: a counter for each reason."""

from __future__ import annotations

from collections import Counter


class Refusals:
    """Counts by the stable codes of errors, which are few."""

    def __init__(self) -> None:
        self._sessions: Counter[str] = Counter()
        self._registrations: Counter[str] = Counter()

    def count_session(self, code: str) -> None:
        """A peer may not connect, or never got as far as being welcome."""
        self._sessions[code] += 1

    def count_registration(self, code: str) -> None:
        """A KV cache was not taken."""
        self._registrations[code] += 1

    def values(self) -> dict[str, float]:
        """`sessions_refused` and `registrations_refused` in all, and each by its reasons."""
        counts: dict[str, float] = {}
        for name, counter in (("sessions_refused", self._sessions), ("registrations_refused", self._registrations)):
            counts[name] = counter.total()
            counts.update({f"{name}_{code}": count for code, count in counter.items()})
        return counts
