"""Where chunks lie: slots of equal size in one buffer, as offsets; the bytes themselves are somebody else's.

The buffer is given as areas (memory becomes usable piece by piece, and no slot may cross a piece). An area is cut into
regions. A slab is a run of neighbouring regions that serves slots of one size: 1, 2, 4... of them, the first a multiple
of that, or the whole area; so of two slabs' runs one lies within the other, or they are apart. It has as many as leave
little over behind its last slot. When that is freed its regions go back, and may serve another size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

SLOT_ALIGNMENT = 256
MAX_REGION_BYTES = 64 << 20
MIN_REGION_BYTES = 1 << 20
REGIONS_PER_AREA = 16
MAX_WASTE = 0.03  # of a slab's bytes, where some number of regions allows it
MAX_RUN_SHARE = 1 / 8  # of the pool, where some number of regions is that small


def slot_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to a slot size."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Pool(Protocol):
    """Hands out places of any size, each by a number that is its own while it is in use.

    Places of one kind make room for each other: once one is free, there is room for another that is not larger.
    """

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

    def kind(self, nbytes: int) -> int:
        """The kind of places of `nbytes`."""

    def runs(self, nbytes: int, limit: int) -> Iterable[list[int]]:
        """At most `limit` sets of used places, each of which makes room for `nbytes` once all of it is free.

        Only where that takes places of other kinds; other sets each time.
        """


@dataclass(slots=True, eq=False)
class _Area:
    """One usable piece of the buffer: regions of `region_bytes` from `offset`, and the slab that has each."""

    offset: int
    region_bytes: int
    slabs: list[_Slab | None]

    @property
    def has_free(self) -> bool:
        return None in self.slabs

    def counts(self, size: int) -> list[int]:
        """How many regions a slab for slots of `size` may have, what suits best first; none where it has no room."""
        num_regions, count = len(self.slabs), 1
        excess: dict[int, float] = {}
        while True:
            span = min(count, num_regions) * self.region_bytes
            if span >= size:
                excess[min(count, num_regions)] = max(0.0, span % size / span - MAX_WASTE)
            if count >= num_regions:
                return sorted(excess, key=lambda each: (excess[each], each))
            count *= 2

    def find(self, count: int) -> int | None:
        """The first of `count` regions that may be a slab, and are free; None where there are none."""
        for first in range(0, len(self.slabs) - count + 1, count):
            if self.slabs[first : first + count].count(None) == count:
                return first
        return None


@dataclass(slots=True, eq=False)
class _Slab:
    """A run of regions cut into slots of one size."""

    area: _Area
    first_region: int
    num_regions: int
    slot_bytes: int
    slots: range = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        base = self.area.offset + self.first_region * self.area.region_bytes
        nbytes = self.num_regions * self.area.region_bytes
        self.slots = range(base, base + nbytes - nbytes % self.slot_bytes, self.slot_bytes)
        self.free = list(reversed(self.slots))
        self.area.slabs[self.first_region : self.first_region + self.num_regions] = [self] * self.num_regions

    @property
    def empty(self) -> bool:
        return len(self.free) == len(self.slots)

    @property
    def wasted_bytes(self) -> int:
        return self.num_regions * self.area.region_bytes % self.slot_bytes

    def used(self) -> set[int]:
        return set(self.slots).difference(self.free)

    def give_back(self) -> None:
        self.area.slabs[self.first_region : self.first_region + self.num_regions] = [None] * self.num_regions


class SlabPool:
    """Slots of any size in one buffer, by offset. Not thread-safe: one thread owns it.

    `wasted_bytes` is what slabs have left over behind their last slots.
    """

    def __init__(self) -> None:
        self._largest_bytes = 0  # that a slot may have
        self._roomy: dict[_Area, None] = {}  # the areas with a free region
        self._full_for: set[int] = set()  # slot sizes for which there are no regions
        self._slabs: dict[int, OrderedDict[_Slab, None]] = {}  # slot size -> slabs
        self._partial: dict[int, dict[_Slab, None]] = {}  # slot size -> slabs that have a free slot
        self._owner: dict[int, _Slab] = {}  # offset of a used slot -> its slab
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.wasted_bytes = 0

    def __repr__(self) -> str:
        return f"<SlabPool {self.used_bytes} of {self.capacity_bytes} bytes in {len(self._owner)} slots>"

    def add_area(self, offset: int, nbytes: int) -> None:
        """Make the bytes `[offset, offset + nbytes)` usable; areas must not overlap."""
        if nbytes < SLOT_ALIGNMENT or offset % SLOT_ALIGNMENT:
            raise ValueError(f"area of {nbytes} bytes at {offset}: needs {SLOT_ALIGNMENT} bytes and that alignment")
        region = min(nbytes, max(MIN_REGION_BYTES, min(MAX_REGION_BYTES, nbytes // REGIONS_PER_AREA)))
        region -= region % SLOT_ALIGNMENT
        area = _Area(offset, region, [None] * (nbytes // region))
        self._largest_bytes = max(self._largest_bytes, region * len(area.slabs))
        self._roomy[area] = None
        self._full_for.clear()
        self.capacity_bytes += nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether an empty pool could hold a slot of `nbytes`."""
        return slot_bytes(nbytes) <= self._largest_bytes

    def kind(self, nbytes: int) -> int:
        """Slots of one size serve each other."""
        return slot_bytes(nbytes)

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
            self._drop(slab)
        else:
            partial[slab] = None

    def runs(self, nbytes: int, limit: int) -> Iterator[list[int]]:
        """The used slots of neighbouring slabs of which at least one has another size; the sizes take turns."""
        size = slot_bytes(nbytes)
        others = [slabs for other, slabs in self._slabs.items() if other != size]
        for slabs in others:
            for _ in range(min(len(slabs), max(1, limit // len(others)))):
                slab = next(iter(slabs))
                slabs.move_to_end(slab)  # the others come first next time
                slots = self._run(slab, size)
                if slots:
                    yield slots

    def _run(self, slab: _Slab, size: int) -> list[int]:
        """The used slots in the regions around a slab that suit slots of `size`, and are a small share of the pool."""
        area = slab.area
        most = self.capacity_bytes * MAX_RUN_SHARE // area.region_bytes
        counts = area.counts(size)
        for count in [*(each for each in counts if each <= most), *sorted(counts)]:
            first = slab.first_region - slab.first_region % count
            if first + count <= len(area.slabs):
                slabs = {each for each in area.slabs[first : first + count] if each is not None}
                return [slot for each in slabs for slot in each.used()]
        return []

    def _new_slab(self, size: int) -> _Slab | None:
        """A slab of the number of regions that suits best of those that are free."""
        best: tuple[int, int, _Area, int] | None = None
        for area in () if size in self._full_for else self._roomy:
            for rank, count in enumerate(area.counts(size)):
                if best is not None and rank >= best[0]:
                    break
                first = area.find(count)
                if first is not None:
                    best = (rank, count, area, first)
            if best is not None and not best[0]:
                break
        if best is None:
            self._full_for.add(size)
            return None
        _, count, area, first = best
        slab = _Slab(area, first, count, size)
        if not area.has_free:
            del self._roomy[area]
        self._partial[size][slab] = self._slabs.setdefault(size, OrderedDict())[slab] = None
        self.wasted_bytes += slab.wasted_bytes
        return slab

    def _drop(self, slab: _Slab) -> None:
        slab.give_back()
        self._roomy[slab.area] = None
        self._full_for.clear()
        self.wasted_bytes -= slab.wasted_bytes
        slabs = self._slabs[slab.slot_bytes]
        del slabs[slab]
        if not slabs:
            del self._slabs[slab.slot_bytes]
