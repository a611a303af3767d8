"""Whom to ask next, after what has failed. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.addresses import EngineKey, Role
from kvferry.router.balance import Balance
from kvferry.router.handover import can_share
from kvferry.router.prefixes import Prefix
from kvferry.router.registry import Engine

__all__ = ["MAX_TRIES", "Alone", "Course", "Pair"]

MAX_TRIES = 3


class Alone(str, enum.Enum):
    """Why a decode engine computes a prompt itself."""

    NO_PREFILL = "no_prefill"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REFUSED = "prefill_refused"
    PROMPT_WANTED = "prompt_wanted"


@dataclass(frozen=True)
class Pair:
    """Who is asked in one try. Without a prefill engine `alone` says why; `seen_bytes` is what it has of the prompt."""

    decode: Engine
    prefill: Engine | None = None
    seen_bytes: int = 0
    alone: Alone | None = None


class Course:
    """One request's tries: three at most, and where prefill engines failed them all, one more without them."""

    def __init__(self, balance: Balance, prefix: Prefix, *, alone: Alone | None = None) -> None:
        self._balance = balance
        self._prefix = prefix
        self._alone = alone
        self._tries = 0
        self._failed: set[EngineKey] = set()

    def next(self, prefills: Sequence[Engine], decodes: Sequence[Engine]) -> Pair | None:
        """Whom to ask, of those that are up; None where no decode engine is. Engines that failed come last."""
        if not decodes:
            return None
        decode = self._balance.decode(self._best(decodes))
        if self._alone is not None:
            return Pair(decode, alone=self._alone)
        partners = [each for each in prefills if can_share(each.address, decode.address)]
        if not partners:
            return Pair(decode, alone=Alone.NO_PREFILL)
        prefill, seen_bytes = self._balance.prefill(self._best(partners), self._prefix)
        return Pair(decode, prefill, seen_bytes)

    def failed(self, key: EngineKey) -> bool:
        """An engine failed the try that was made: whether there is to be another."""
        self._failed.add(key)
        self._tries += 1
        if self._tries < MAX_TRIES:
            return True
        last = key.role is Role.PREFILL and self._alone is None
        if last:
            self._alone = Alone.PREFILL_FAILED
        return last

    def refused(self) -> None:
        """A prefill engine does not take the request: whether that is right, the decode engine will say."""
        self._alone = Alone.PREFILL_REFUSED

    def _best(self, engines: Sequence[Engine]) -> Sequence[Engine]:
        return [each for each in engines if each.key not in self._failed] or engines
