"""Which ranks of the other engine a tensor-parallel rank has to do with. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Addresses = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `number` of `size`. `replicated`: each rank has all of the KV (latent attention), not its heads of it."""

    number: int
    size: int
    replicated: bool = False

    def targets(self, addresses: Sequence[str]) -> Addresses:
        """The ranks that get KV from this one, of an engine whose ranks have these addresses."""
        if len(addresses) >= self.size:
            return self._share(addresses)
        ranks_each = self.size // len(addresses)
        if self.replicated and self.number % ranks_each:
            return ()  # the first of those that have the same sends it
        return (addresses[self.number // ranks_each],)

    def sources(self, addresses: Sequence[str]) -> Addresses:
        """The ranks that this one gets KV from."""
        if len(addresses) < self.size:
            return (addresses[self.number * len(addresses) // self.size],)
        share = self._share(addresses)
        return share[:1] if self.replicated else share

    def _share(self, addresses: Sequence[str]) -> Addresses:
        each = len(addresses) // self.size
        return tuple(addresses[self.number * each : (self.number + 1) * each])
