"""Ids that have ended: remembered for a while, a bounded number of them."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from kvferry.errors import TransferError

MAX_REMEMBERED = 8192

K = TypeVar("K", bound=Hashable)


class Ending(enum.Enum):
    """What was dropped may be offered again; what is unwanted is refused until it is claimed."""

    DROPPED = "dropped"
    UNWANTED = "unwanted"


class Remembered(NamedTuple):
    ending: Ending
    code: str
    text: str
    until: float

    def error(self) -> TransferError:
        """An error of its own for each who asks."""
        return TransferError(self.code, self.text)


class EndedIds(Generic[K]):
    """The latest `MAX_REMEMBERED` ids that ended, each for the time given; the oldest goes first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[K, Remembered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def remember(self, key: K, ended: Remembered) -> None:
        """Replaces what was known of the key."""
        self._ids.pop(key, None)
        self._ids[key] = ended
        if len(self._ids) > MAX_REMEMBERED:
            self._ids.popitem(last=False)

    def find(self, key: K, now: float) -> Remembered | None:
        """What is known of the key."""
        found = self._ids.get(key)
        if found is not None and found.until <= now:
            del self._ids[key]
            return None
        return found

    def forget(self, key: K) -> None:
        """The key is in use again. Idempotent."""
        self._ids.pop(key, None)
