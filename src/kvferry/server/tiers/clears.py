"""Who waits until something is gone from the lower tiers, and when what could not be deleted is tried again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.cache import Chunk, Space

_LOG = logging.getLogger(__name__)

_FIRST_S = 1.0
_LONGEST_S = 300.0
_MAX_LEFT = 1 << 16  # of the disk's, the scan of the next start finds the others

K = TypeVar("K")
V = TypeVar("V")

OnGone = Callable[[str], None]
"""Called with an empty text once it is gone, or with why it may still be there."""


class Ending:
    """Joins the parts of one request: calls `on_end` once, when all have ended or the first has failed."""

    def __init__(self, on_end: OnGone, deadline: float) -> None:
        self.deadline = deadline
        self._on_end: OnGone | None = on_end
        self._num_open = 1

    @property
    def ended(self) -> bool:
        """Whether `on_end` was called."""
        return self._on_end is None

    def part(self) -> OnGone:
        """One part more; what is returned ends it."""
        self._num_open += 1
        return self.end

    def end(self, text: str = "") -> None:
        """A part has ended, or (called by who made this) there will be no more parts."""
        self._num_open -= 1
        if self._on_end is not None and (text or not self._num_open):
            on_end, self._on_end = self._on_end, None
            on_end(text)


class Undeleted(Generic[K, V]):
    """What could not be deleted: tried again after 1 s, then after twice as long each time, up to 5 minutes.

    Belongs to the loop thread. Each name is there once.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._left: dict[K, V] = {}
        self._delay_s = 0.0
        self._at = self._now = 0.0

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, name: K) -> bool:
        return name in self._left

    def values(self) -> Collection[V]:
        """All of it."""
        return self._left.values()

    def add(self, name: K, value: V, text: str) -> V | None:
        """It could not be deleted, and why; what it takes the place of, or what there is no room for any more."""
        if self._now >= self._at:  # else it belongs to the round that is counted already
            if not self._delay_s:
                _LOG.error("what is deleted in the %s tier stays there, and is tried again: %s", self._tier, text)
            self._delay_s = min(max(_FIRST_S, 2 * self._delay_s), _LONGEST_S)
            self._at = self._now + self._delay_s
        replaced = self._left.pop(name, None)
        self._left[name] = value
        if replaced is None and len(self._left) > _MAX_LEFT:
            replaced = self._left.pop(next(iter(self._left)))
        return replaced

    def take(self, *, busy: bool) -> list[V]:
        """What it is time to try again. `busy`: some of it is being tried."""
        if self._left and self._now >= self._at:
            again = list(self._left.values())
            self._left.clear()
            return again
        if not self._left and not busy:
            self._delay_s = 0.0
        return []

    def hurry(self) -> None:
        """It is time now."""
        self._at = self._now

    def tick(self, now: float) -> None:
        """Time passes."""
        self._now = now


@dataclass(slots=True, eq=False)
class _Wait:
    """For `num_left` files: those of `chunks`, or all with numbers below `end`."""

    on_gone: OnGone
    num_left: int
    end: int
    chunks: set[Chunk] | None

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.offset < self.end if self.chunks is None else chunk in self.chunks


class Files:
    """How many files each space has, from the first plan to write one until it is deleted, and who waits for that.

    Belongs to the loop thread. A chunk's `offset` is its file's number: later ones have higher ones.
    """

    def __init__(self) -> None:
        self._num_files: Counter[Space] = Counter()
        self._end = 0
        self._waits: dict[Space, list[_Wait]] = {}

    def come(self, chunk: Chunk) -> None:
        """It has a file, or may get one."""
        self._num_files[chunk.space] += 1
        self._end = max(self._end, chunk.offset + 1)

    def go(self, chunk: Chunk) -> None:
        """Its file is no more, or is another chunk's now."""
        self._num_files[chunk.space] -= 1
        if not self._num_files[chunk.space]:
            del self._num_files[chunk.space]
        for wait in self._waits.get(chunk.space, ()):
            wait.num_left -= chunk in wait
        self._end_waits(chunk.space, "", lambda wait: wait.num_left <= 0)

    def fail(self, chunk: Chunk, text: str) -> None:
        """Its file could not be deleted."""
        self._end_waits(chunk.space, text, lambda wait: chunk in wait)

    def wait(self, space: Space, chunks: Collection[Chunk] | None, on_gone: OnGone) -> None:
        """Call back when the files of these chunks, or all that the space has now, are gone, or one cannot go."""
        num_left = self._num_files[space] if chunks is None else len(chunks)
        wait = _Wait(on_gone, num_left, self._end, None if chunks is None else set(chunks))
        self._waits.setdefault(space, []).append(wait)
        self._end_waits(space, "", lambda wait: wait.num_left <= 0)

    def _end_waits(self, space: Space, text: str, ends: Callable[[_Wait], bool]) -> None:
        waits = self._waits.get(space)
        if waits is None:
            return
        ending = [wait for wait in waits if ends(wait)]
        if ending:
            kept = [wait for wait in waits if wait not in ending]
            if kept:
                self._waits[space] = kept
            else:
                del self._waits[space]
            for wait in ending:
                wait.on_gone(text)
