"""Trees that the disk's index forgets: out of sight at once, whatever their size, and taken apart leaf by leaf."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.cache import Chunk, ChunkIndex, ChunkState, Space
from kvferry.cache.tiers import ChunkName
from kvferry.server.tiers.clears import OnGone
from kvferry.server.tiers.queue import name_of


@dataclass(slots=True, eq=False)
class Cut:
    """All from `root` on, taken apart as far as `at`; `waiting` want to hear when the files are gone."""

    root: Chunk
    at: Chunk
    waiting: list[OnGone] = field(default_factory=list)


class Cuts:
    """Belongs to the loop thread. The index still lists what is cut off: who asks it asks here, too.

    Nothing is to be written below what is cut off. One tree is taken apart after the other.

    Parameters
    ----------
    on_end
        Called when nothing of a tree is in the index any more.
    """

    def __init__(self, index: ChunkIndex, on_end: Callable[[Cut], None]) -> None:
        self._index = index
        self._on_end = on_end
        self._cuts: deque[Cut] = deque()
        self._names: dict[ChunkName, Cut] = {}  # of the roots

    def __len__(self) -> int:
        return len(self._cuts)

    def __contains__(self, name: ChunkName) -> bool:
        """Whether a tree that begins with this chunk is being taken apart."""
        return name in self._names

    def add(self, root: Chunk) -> Cut:
        """Cut it off, with all below it; `step` does the work. It may be cut off already, by itself or with others."""
        cut = self._over(root)
        if cut is None:
            cut = self._names[name_of(root)] = Cut(root, root)
            self._cuts.append(cut)
        return cut

    def get(self, name: ChunkName) -> Cut | None:
        """The tree that begins with this chunk, while it is taken apart."""
        return self._names.get(name)

    def limit(self, space: Space, keys: Sequence[bytes]) -> int:
        """How many chunks of a chain, from its root on, are not cut off."""
        depths = (cut.root.depth for cut in self._cuts if cut.root.space == space and _is_in(cut.root, keys))
        return min(depths, default=len(keys) + 1) - 1

    def cover(self, chunk: Chunk) -> bool:
        """Whether a chunk is cut off."""
        return bool(self._cuts) and self._over(chunk) is not None

    def step(self) -> bool:
        """Go down to a leaf, or forget one; whether there is more to do."""
        if not self._cuts:
            return False
        cut = self._cuts[0]
        while cut.at is not cut.root and cut.at.state is ChunkState.GONE:  # evicted meanwhile
            assert cut.at.parent is not None
            cut.at = cut.at.parent
        if cut.at.state is not ChunkState.GONE:
            below = next((each for each in cut.at.children if each.state is not ChunkState.GONE), None)
            if below is not None:
                cut.at = below
                return True
            self._index.discard(cut.at)
        if cut.root.state is ChunkState.GONE:
            self._cuts.popleft()
            del self._names[name_of(cut.root)]
            self._on_end(cut)
        return bool(self._cuts)

    def _over(self, chunk: Chunk) -> Cut | None:
        roots = ((cut, cut.root) for cut in self._cuts if cut.root.space == chunk.space)
        return next(
            (cut for cut, root in roots if chunk.depth >= root.depth and chunk.at_depth(root.depth) is root), None
        )


def _is_in(chunk: Chunk, keys: Sequence[bytes]) -> bool:
    return chunk.depth <= len(keys) and keys[chunk.depth - 1] == chunk.key
