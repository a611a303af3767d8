"""Who is asked: the prefill engine that will first have read the prompt, the decode engine with least to do. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.prefixes import PIECE_BYTES, Prefix, PrefixIndex
from kvferry.router.registry import Engine

__all__ = ["Balance", "Work"]

_MAX_PIECES = 1 << 18  # 64 MiB of prompts, or 16 M tokens
_REQUEST_BYTES = PIECE_BYTES  # what any request costs, however short


@dataclass
class _Load:
    """What an engine has to do."""

    requests: int = 0
    num_bytes: int = 0
    chosen_at: int = 0


class Work:
    """A part of an engine's load, until it ends."""

    def __init__(self, loads: dict[int, _Load], engine: Engine, num_bytes: int) -> None:
        self._loads = loads
        self._serial = engine.serial
        self._num_bytes = num_bytes
        self._ended = False
        load = loads.setdefault(engine.serial, _Load())
        load.requests += 1
        load.num_bytes += num_bytes

    def end(self) -> None:
        """Idempotent."""
        if self._ended:
            return
        self._ended = True
        load = self._loads[self._serial]
        load.requests -= 1
        load.num_bytes -= self._num_bytes
        if not load.requests:
            load.num_bytes = 0


class Balance:
    """What each engine has been given and has not done yet. Not for several threads."""

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        self._index = PrefixIndex(max_pieces)
        self._loads: dict[int, _Load] = {}
        self._choices = itertools.count(1)

    def prefill(self, engines: Sequence[Engine], prefix: Prefix) -> tuple[Engine, int]:
        """The engine, of at least one, that should read the prompt, and how many of its bytes it has probably read.

        It is the one that will be done first: what each has to read before, and what it has not seen of this prompt.
        So a beginning that many prompts share draws them to one engine only as long as that one has not more to do.
        """
        matched = self._index.matched(prefix.pieces)

        def cost(engine: Engine) -> tuple[int, int]:
            load = self._load(engine)
            unseen = prefix.num_bytes - matched.get(engine.serial, 0) * PIECE_BYTES
            return load.num_bytes + unseen, load.chosen_at

        chosen = min(engines, key=cost)
        self._load(chosen).chosen_at = next(self._choices)
        return chosen, matched.get(chosen.serial, 0) * PIECE_BYTES

    def decode(self, engines: Sequence[Engine]) -> Engine:
        """The engine, of at least one, with the fewest requests; of equals the one whose choice is longest ago."""

        def cost(engine: Engine) -> tuple[int, int]:
            load = self._load(engine)
            return load.requests, load.chosen_at

        chosen = min(engines, key=cost)
        self._load(chosen).chosen_at = next(self._choices)
        return chosen

    def begin_prefill(self, engine: Engine, prefix: Prefix, seen_bytes: int) -> Work:
        """The engine was asked to read the prompt, of which it has seen so much; from now on it has seen it all."""
        self._index.add(prefix.pieces, engine.serial)
        return Work(self._loads, engine, prefix.num_bytes - seen_bytes + _REQUEST_BYTES)

    def begin_decode(self, engine: Engine) -> Work:
        return Work(self._loads, engine, 0)

    def keep_only(self, engines: Sequence[Engine]) -> None:
        """Forget the loads of all others that have nothing to do any more."""
        living = {engine.serial for engine in engines}
        for serial, load in list(self._loads.items()):
            if serial not in living and not load.requests:
                del self._loads[serial]

    def _load(self, engine: Engine) -> _Load:
        return self._loads.setdefault(engine.serial, _Load())
