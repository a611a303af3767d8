"""Which prompts begin alike, and which engine has seen such a beginning. Pure.

A prompt is cut into pieces, each named by the hash of all up to its end: equal names, equal beginnings. What an engine
really keeps in its cache is its own affair; this is a guess, which costs time where it is wrong, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

__all__ = ["PIECE_BYTES", "Prefix", "PrefixIndex", "cut_prefix"]

PIECE_BYTES = 256  # about 64 tokens, as text and as 32-bit ids
_MAX_PIECES = 4096  # what is behind them makes no difference to who has most of a prompt
_MAX_HOLDERS = 8


@dataclass(frozen=True)
class Prefix:
    """A prompt's pieces by name, the first first, and its whole size."""

    pieces: tuple[bytes, ...]
    num_bytes: int


def cut_prefix(seed: bytes, content: bytes) -> Prefix:
    """`seed` stands for all that decides KV beside the prompt itself. A last piece that is not full has no name."""
    name, names = xxh3_128_digest(seed), []
    for start in range(0, min(len(content), _MAX_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        name = xxh3_128_digest(name + content[start : start + PIECE_BYTES])
        names.append(name)
    return Prefix(tuple(names), len(content))


class PrefixIndex:
    """Which engines were sent which pieces; the least recently used are dropped. Not for several threads.

    A piece goes before those that it begins, so that what is left always starts at a prompt's beginning.
    """

    def __init__(self, max_pieces: int) -> None:
        self._max_pieces = max_pieces
        self._holders: OrderedDict[bytes, OrderedDict[int, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, pieces: Sequence[bytes], engine: int) -> None:
        """The engine of this serial number has, or will have, these pieces. The last 8 engines of a piece are known."""
        for name in reversed(pieces[: self._max_pieces]):  # the beginning is touched last: it goes last
            holders = self._holders.setdefault(name, OrderedDict())
            holders[engine] = None
            holders.move_to_end(engine)
            if len(holders) > _MAX_HOLDERS:
                holders.popitem(last=False)
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_pieces:
            self._holders.popitem(last=False)

    def matched(self, pieces: Iterable[bytes]) -> dict[int, int]:
        """How many of the leading pieces each engine has that has any."""
        found: dict[int, int] = {}
        for depth, name in enumerate(pieces):
            holders = self._holders.get(name, ())
            going_on = [engine for engine in holders if found.get(engine, 0) == depth]
            if not going_on:
                break
            found.update(dict.fromkeys(going_on, depth + 1))
        return found
