"""Slots of a ring, lent in turns to whoever waits for one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol


class Waiter(Protocol):
    """Who may get a slot."""

    def pump(self) -> None:
        """There is a slot again."""


class Slots:
    """While several wait nobody gets a second slot before each has one. For the loop's thread."""

    def __init__(self, addresses: Iterable[int]) -> None:
        self._free = deque(addresses)
        self._owners: dict[int, Waiter] = {}
        self._held: Counter[Waiter] = Counter()
        self._waiting: deque[Waiter] = deque()

    def take(self, waiter: Waiter) -> int | None:
        """A slot, or None: `pump` is called when there may be one."""
        others = [other for other in self._waiting if other is not waiter]
        if not self._free or (self._held[waiter] and any(not self._held[other] for other in others)):
            if waiter not in self._waiting:
                self._waiting.append(waiter)
            return None
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        slot = self._free.popleft()
        self._owners[slot] = waiter
        self._held[waiter] += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Nothing uses it any more."""
        owner = self._owners.pop(slot)
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._free.append(slot)
        for waiter in sorted(self._waiting, key=lambda waiter: self._held[waiter] > 0):
            if waiter in self._waiting:
                self._waiting.remove(waiter)  # it comes back, behind the others, where it still wants one
                waiter.pump()
        owner.pump()
