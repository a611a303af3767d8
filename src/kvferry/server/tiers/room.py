"""How much the lower tiers may hold, and how much may wait for them, of one tenant and of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_TENANT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TierLimits:
    """How many bytes the disk may hold, and how many each tenant there and in the bucket (see `Quotas`)."""

    disk_bytes: int = 0
    disk_quotas: Mapping[str, int] = field(default_factory=dict)
    remote_quotas: Mapping[str, int] = field(default_factory=dict)


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
