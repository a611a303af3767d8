"""What a stream still has to do before something may go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kvferry.p2p.streams import Event

# How often streams are asked how far they are: what took a while is noticed an eighth of that late.
_SOONEST_S, _LATE, _LATEST_S = 50e-6, 1 / 8, 500e-6

Call = Callable[[], None]


class _Awaited(NamedTuple):
    event: Event
    call: Call
    since: float


class AwaitedEvents:
    """For the loop's thread: events, and what to call once each is done."""

    def __init__(self) -> None:
        self._waiting: list[_Awaited] = []

    def add(self, event: Event | None, call: Call, now: float) -> None:
        """Call it once the event is done; at once where there is none."""
        if event is None:
            call()
        else:
            self._waiting.append(_Awaited(event, call, now))

    def look(self, now: float) -> float:
        """Call what was waited for; when to look again. Of a stream, none is asked after one that is not done."""
        awaited, self._waiting = self._waiting, []
        busy: set[int] = set()
        for each in awaited:
            if each.event.stream not in busy and each.event.query():
                each.call()
            else:
                busy.add(each.event.stream)
                self._waiting.append(each)
        if not self._waiting:
            return math.inf
        return now + min(max(_SOONEST_S, _LATE * (now - self._waiting[-1].since)), _LATEST_S)
