"""Where chunks lie: slots of equal size in one buffer, as offsets; the bytes themselves are somebody else's.

The buffer is given as areas (memory becomes usable piece by piece, and no slot may cross a piece). An area is cut into
regions. A slab is a run of regions that serves slots of one size; when its last slot is freed its regions go back, and
may serve another size. So there is no fragmentation within a size, and little between sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

SLOT_ALIGNMENT = 256
MAX_REGION_BYTES = 64 << 20
MIN_REGION_BYTES = 1 << 20
REGIONS_PER_AREA = 16


def slot_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to a slot size."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Pool(Protocol):
    """Hands out places of any size, each by a number that is its own while it is in use."""

    @property
    def capacity_bytes(self) -> int:
        """How many bytes there may be in all; may change."""

    @property
    def used_bytes(self) -> int:
        """How many are in use."""

    def allocate(self, nbytes: int) -> int | None:
        """A place for `nbytes`, or None where there is no room."""

    def free(self, offset: int) -> None:
        """Give a place back."""

    def fits(self, nbytes: int) -> bool:
        """Whether an empty pool could hold `nbytes`."""


@dataclass(slots=True, eq=False)
class _Area:
    """One usable piece of the buffer: `num_regions` regions of `region_bytes` from `offset`."""

    offset: int
    region_bytes: int
    num_regions: int
    free: set[int] = field(default_factory=set)

    def take(self, count: int) -> int | None:
        """The first of `count` neighbouring free regions, which become used; None where there are none."""
        if len(self.free) < count:
            return None
        if count == 1:
            return self.free.pop()
        run = 0
        for region in range(self.num_regions):
            run = run + 1 if region in self.free else 0
            if run == count:
                first = region - count + 1
                self.free.difference_update(range(first, region + 1))
                return first
        return None


@dataclass(slots=True, eq=False)
class _Slab:
    """A run of regions cut into slots of one size."""

    area: _Area
    first_region: int
    num_regions: int
    slot_bytes: int
    num_slots: int
    free: list[int]

    @property
    def empty(self) -> bool:
        return len(self.free) == self.num_slots


class SlabPool:
    """Slots of any size in one buffer, by offset. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._areas: list[_Area] = []
        self._roomy: dict[_Area, None] = {}  # the areas with a free region
        self._partial: dict[int, dict[_Slab, None]] = {}  # slot size -> slabs that have a free slot
        self._owner: dict[int, _Slab] = {}  # offset of a used slot -> its slab
        self.capacity_bytes = 0
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<SlabPool {self.used_bytes} of {self.capacity_bytes} bytes in {len(self._owner)} slots>"

    def add_area(self, offset: int, nbytes: int) -> None:
        """Make the bytes `[offset, offset + nbytes)` usable; areas must not overlap."""
        if nbytes < SLOT_ALIGNMENT or offset % SLOT_ALIGNMENT:
            raise ValueError(f"area of {nbytes} bytes at {offset}: needs {SLOT_ALIGNMENT} bytes and that alignment")
        region = min(nbytes, max(MIN_REGION_BYTES, min(MAX_REGION_BYTES, nbytes // REGIONS_PER_AREA)))
        region -= region % SLOT_ALIGNMENT
        count = nbytes // region
        area = _Area(offset, region, count, set(range(count)))
        self._areas.append(area)
        self._roomy[area] = None
        self.capacity_bytes += nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether an empty pool could hold a slot of `nbytes`."""
        need = slot_bytes(nbytes)
        return any(area.region_bytes * area.num_regions >= need for area in self._areas)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free slot of `nbytes`, or None where there is no room."""
        if nbytes <= 0:
            raise ValueError(f"a slot of {nbytes} bytes; a slot holds at least one")
        size = slot_bytes(nbytes)
        partial = self._partial.setdefault(size, {})
        slab = next(iter(partial), None) or self._new_slab(size)
        if slab is None:
            return None
        offset = slab.free.pop()
        if not slab.free:
            partial.pop(slab, None)
        self._owner[offset] = slab
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give a slot back. Freeing what is not in use is a fault of ours."""
        slab = self._owner.pop(offset)
        slab.free.append(offset)
        self.used_bytes -= slab.slot_bytes
        partial = self._partial[slab.slot_bytes]
        if slab.empty:
            partial.pop(slab, None)
            slab.area.free.update(range(slab.first_region, slab.first_region + slab.num_regions))
            self._roomy[slab.area] = None
        else:
            partial[slab] = None

    def _new_slab(self, size: int) -> _Slab | None:
        for area in self._roomy:
            count = -(-size // area.region_bytes)
            first = area.take(count)
            if first is None:
                continue
            if not area.free:
                del self._roomy[area]
            base = area.offset + first * area.region_bytes
            num_slots = count * area.region_bytes // size
            offsets = [base + slot * size for slot in reversed(range(num_slots))]
            slab = _Slab(area, first, count, size, num_slots, offsets)
            self._partial[size][slab] = None
            return slab
        return None
