"""Where transfers land that nobody has claimed yet: the receive buffer, and the pool behind it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.p2p.memory import FlatMemory
from kvferry.p2p.receive.regions import Region
from kvferry.p2p.signal.messages import Offer
from kvferry.p2p.signal.session import Session
from kvferry.p2p.streams import Use


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Room for one transfer, all of it in one region."""

    session: Session
    region: Region
    memory: FlatMemory
    nbytes: int


class _Lent:
    """Lives as long as any view of a tensor that was lent, and keeps the memory."""

    def __init__(self, memory: object) -> None:
        self.memory = memory


class RecvStore:
    """The first region that has room for all of a transfer takes it. For the loop's thread, but for `lend`."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.regions = regions
        self._held: Counter[Session] = Counter()

    def could_ever(self, offer: Offer) -> bool:
        """Whether any region is large enough for it."""
        return any(region.could_ever(offer.item_bytes) for region in self.regions)

    def reserve(self, session: Session, offer: Offer) -> Place | None:
        """Room for all its items, in the first region that has it."""
        for region in self.regions:
            memory = region.reserve(offer.item_bytes)
            if memory is not None:
                nbytes = sum(offer.item_bytes)
                self._held[session] += nbytes
                return Place(session, region, memory, nbytes)
        return None

    def release(self, place: Place) -> None:
        """Take room back."""
        place.region.release(place.memory)
        self._held[place.session] -= place.nbytes
        if not self._held[place.session]:
            del self._held[place.session]

    def held(self, session: Session) -> int:
        """Bytes that a session's transfers hold."""
        return self._held[session]

    def used_bytes(self) -> dict[str, int]:
        """Bytes that are lent or reserved, by region."""
        return {region.name: region.used_bytes for region in self.regions}

    def close(self) -> None:
        """Lend no more; what is lent stays as it is. Idempotent."""
        for region in self.regions:
            region.close()


def lend(place: Place, on_released: Callable[[Use], None]) -> tuple[torch.Tensor, Use]:
    """The place's only item as flat bytes; `on_released` is called when the last view of them is gone."""
    address, nbytes = place.memory.items[0]
    lent, use = _Lent(place.memory.owner), Use()
    weakref.finalize(lent, on_released, use).atexit = False
    return place.region.tensor(address, max(1, nbytes), lent)[:nbytes], use
