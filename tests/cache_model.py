"""What ChunkIndex must do, said again, plainly: every question is answered by going through all chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.cache import Chunk, Space


@dataclass(eq=False)
class ModelChunk:
    """`writing` until its store has ended, `whole` once that has gone well, `listed` while lookups may find it."""

    space: Space
    key: bytes
    nbytes: int
    parent: ModelChunk | None
    twin: Chunk
    last_use: int = 0
    writing: bool = True
    whole: bool = False
    listed: bool = True
    has_place: bool = True
    dirty: bool = False
    pins: int = 0

    def ancestors(self) -> Iterator[ModelChunk]:
        """Its parent, and on to the root."""
        link = self.parent
        while link is not None:
            yield link
            link = link.parent

    @property
    def depth(self) -> int:
        return 1 + len(list(self.ancestors()))

    @property
    def visible(self) -> bool:
        return all(chunk.listed and chunk.whole for chunk in (self, *self.ancestors()))


@dataclass
class Model:
    """All chunks that ever were. `capacity` and `limits` in bytes."""

    capacity: int
    limits: dict[str, int]
    chunks: list[ModelChunk] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    clock: int = 0

    def find(self, space: Space, key: bytes) -> ModelChunk | None:
        found = [chunk for chunk in self.chunks if chunk.listed and (chunk.space, chunk.key) == (space, key)]
        assert len(found) < 2
        return found[0] if found else None

    def prefix(self, space: Space, keys: Sequence[bytes]) -> list[ModelChunk]:
        """What a lookup finds."""
        found: list[ModelChunk] = []
        for key in keys:
            chunk = self.find(space, key)
            if chunk is None or not chunk.visible:
                break
            found.append(chunk)
        return found

    def used(self, tenant: str | None = None) -> int:
        return sum(chunk.nbytes for chunk in self.chunks if chunk.has_place and tenant in (None, chunk.space.tenant))

    def below(self, root: ModelChunk) -> list[ModelChunk]:
        """All that ever hung from `root`, and itself."""
        return [chunk for chunk in self.chunks if chunk is root or root in chunk.ancestors()]

    def use(self, chunk: ModelChunk) -> None:
        self.clock += 1
        chunk.last_use = self.clock

    def oldest(self, tenant: str | None, keep: ModelChunk | None = None) -> ModelChunk | None:
        """Which chunk is to go next."""
        free = [
            chunk
            for chunk in self.chunks
            if chunk.listed
            and chunk.whole
            and not chunk.dirty
            and chunk is not keep
            and tenant in (None, chunk.space.tenant)
            and not any(
                below.pins or (below is not chunk and below.listed) for below in self.below(chunk) if below.has_place
            )
        ]
        return min(free, key=lambda chunk: max(below.last_use for below in self.below(chunk)), default=None)

    def evict(self, tenant: str | None, keep: ModelChunk | None = None) -> bool:
        chunk = self.oldest(tenant, keep)
        if chunk is None:
            return False
        chunk.listed = chunk.has_place = False
        self.counters["evicted"] += 1
        return True

    def make_room(self, tenant: str, nbytes: int, keep: ModelChunk | None) -> str | None:
        """Evict what has to go; why there is no room all the same."""
        limit = self.limits.get(tenant, 1 << 60)
        if nbytes > self.capacity:
            return "skipped_full"
        if nbytes > limit:
            return "skipped_quota"
        while self.used(tenant) + nbytes > limit:
            if not self.evict(tenant, keep):
                behind = any(chunk.dirty for chunk in self.chunks if chunk.space.tenant == tenant)
                return "skipped_behind" if behind else "skipped_quota"
        while self.used() + nbytes > self.capacity:
            if not self.evict(None, keep):
                return "skipped_behind" if any(chunk.dirty for chunk in self.chunks) else "skipped_full"
        return None

    def end_writing(self, chunks: Sequence[ModelChunk], *, whole: bool, dirty: bool) -> None:
        for chunk in chunks:
            if not whole:
                for below in self.below(chunk):
                    self.forget(below, counter="aborted")
            chunk.writing = False
            if chunk.listed:
                chunk.whole, chunk.dirty = True, dirty
                self.counters["committed"] += 1
                self.use(chunk)
            else:
                chunk.has_place = False
                self.counters["aborted"] += 1

    def discard(self, root: ModelChunk) -> int:
        before = self.counters["discarded"]
        for chunk in self.below(root):
            self.forget(chunk, counter="discarded")
        self.settle()
        return self.counters["discarded"] - before

    def forget(self, chunk: ModelChunk, *, counter: str) -> None:
        if chunk.listed and not chunk.writing:
            self.counters[counter] += 1
            chunk.has_place = any(below.pins for below in self.below(chunk))
        chunk.listed = chunk.dirty = False

    def settle(self) -> None:
        """Take the places of what is forgotten, and not needed by a pin any more."""
        for chunk in self.chunks:
            if not chunk.listed and not chunk.writing:
                chunk.has_place = chunk.has_place and any(below.pins for below in self.below(chunk))
