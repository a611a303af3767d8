"""Which chunks go together, where a place of one kind can only come from many of another."""

from __future__ import annotations

from kvferry.cache.chunk import Chunk, ChunkState
from kvferry.cache.pool import Pool

_MAX_RUNS = 32  # looked at for one place
_MAX_VISITS = 1 << 14  # of chunks, for all places of one store: some 10 ms


class Runs:
    """Finds sets of chunks that may all go, and make room for a place of another kind. Looks, and changes nothing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._visits_left = 0
        self._compared = False
        self.chunks: dict[int, Chunk] = {}  # by place

    def begin(self) -> None:
        """A store looks for places: what that may cost is counted from here on."""
        self._visits_left = _MAX_VISITS
        self._compared = False

    def spend(self) -> bool:
        """Whether one chunk more may be looked at."""
        self._visits_left -= 1
        return self._visits_left >= 0

    def oldest(self, nbytes: int, leaf: Chunk | None) -> list[Chunk]:
        """All chunks that go with the best run, parents first; empty where `leaf` should go instead, or none can.

        The best is that of which the newest use is the longest ago. With a `leaf` to go, a store asks but once.
        """
        if leaf is not None and self._compared:
            return []
        self._compared = True
        best: list[Chunk] = []
        best_use = None if leaf is None else leaf.last_use
        for places in self._pool.runs(nbytes, _MAX_RUNS):
            chunks = self._with_all_below([self.chunks[place] for place in places])
            if chunks:
                use = max(chunk.last_use for chunk in chunks)
                if best_use is None or use < best_use:
                    best, best_use = chunks, use
        return best

    def _with_all_below(self, chunks: list[Chunk]) -> list[Chunk]:
        """These and all that hangs from them; empty where some of that has to stay, or is too much to look at."""
        seen = set(chunks)
        for chunk in chunks:
            if not self.spend() or chunk.pins or chunk.dirty or chunk.state is not ChunkState.COMMITTED:
                return []
            fresh = chunk.children - seen
            seen |= fresh
            chunks.extend(fresh)
        return chunks
