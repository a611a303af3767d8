"""Where transfers land that nobody has claimed yet: the receive buffer, and the pool behind it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.ipc.shared_memory import tensor_at
from kvferry.p2p.memory import FlatMemory
from kvferry.p2p.receive.arena import Arena
from kvferry.p2p.signal.messages import Offer
from kvferry.p2p.signal.session import Session


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A stretch of memory of which parts are lent."""

    name: str
    memory: torch.Tensor
    arena: Arena

    @classmethod
    def of(cls, name: str, memory: torch.Tensor) -> Region:
        return cls(name, memory, Arena(memory.numel()))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Room for one transfer."""

    session: Session
    region: Region
    offsets: tuple[int, ...]
    memory: FlatMemory
    nbytes: int


class _Lent:
    """Lives as long as any view of a tensor that was lent, and keeps the memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class RecvStore:
    """The first region that has room for all of a transfer takes it. For the loop's thread, but for `lend`."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.regions = regions
        self._held: Counter[Session] = Counter()

    def could_ever(self, offer: Offer) -> bool:
        """Whether any region is large enough for it."""
        return any(region.arena.could_ever(offer.item_bytes) for region in self.regions)

    def reserve(self, session: Session, offer: Offer) -> Place | None:
        """Room for all its items, in one region."""
        for region in self.regions:
            offsets = region.arena.reserve(offer.item_bytes)
            if offsets is not None:
                base = region.memory.data_ptr()
                items = tuple((base + at, size) for at, size in zip(offsets, offer.item_bytes, strict=True))
                nbytes = sum(offer.item_bytes)
                self._held[session] += nbytes
                return Place(session, region, offsets, FlatMemory(items, region.memory), nbytes)
        return None

    def release(self, place: Place) -> None:
        """Take room back."""
        place.region.arena.release(place.offsets)
        self._held[place.session] -= place.nbytes
        if not self._held[place.session]:
            del self._held[place.session]

    def held(self, session: Session) -> int:
        """Bytes that a session's transfers hold."""
        return self._held[session]

    def used_bytes(self) -> dict[str, int]:
        """Bytes that are lent or reserved, by region."""
        return {region.name: region.arena.nbytes - region.arena.free_bytes for region in self.regions}


def lend(place: Place, on_released: Callable[[], None]) -> torch.Tensor:
    """The place's only item as flat bytes; `on_released` is called when the last view of them is gone."""
    address, nbytes = place.memory.items[0]
    lent = _Lent(place.region.memory)
    weakref.finalize(lent, on_released).atexit = False
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return tensor_at(address, nbytes, lent)
