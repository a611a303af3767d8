"""How much may wait for the lower tiers, of one tenant and of all."""

from __future__ import annotations

from collections import Counter

_TENANT_SHARE = 0.5


class WaitingRoom:
    """Holds `limit` of whatever is counted, of one tenant at most the half of it. Belongs to the loop thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    def fits(self, tenant: str, amount: int) -> bool:
        """Whether so much more of the tenant's may wait."""
        return len(self) + amount <= self._limit and self._held[tenant] + amount <= self._limit * _TENANT_SHARE

    def enter(self, tenant: str, amount: int) -> None:
        """So much waits."""
        self._held[tenant] += amount

    def leave(self, tenant: str, amount: int) -> None:
        """So much does not wait any more."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
