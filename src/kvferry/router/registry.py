"""Which engines there are, and which of them may be asked. Pure: the time comes in as an argument."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.heartbeat import Heartbeat

__all__ = ["Engine", "Registry"]


@dataclass(frozen=True)
class Engine:
    """One engine's life, from when it was first heard: one that was away and came back has another `serial`.

    `given` is one that was named in the configuration; it is never forgotten.
    """

    serial: int
    address: EngineAddress
    given: bool = False

    @property
    def key(self) -> EngineKey:
        return self.address.key


@dataclass
class _State:
    engine: Engine
    heard_at: float
    up: bool
    silent: bool = field(default=False)  # it was reported as lost


class Registry:
    """All engines, by key. Not for several threads."""

    def __init__(self, timeout_s: float, max_engines: int) -> None:
        """`timeout_s` is how long an engine may say nothing; `max_engines` bounds those that come by heartbeat."""
        self._timeout_s = timeout_s
        self._max_engines = max_engines
        self._serials = itertools.count(1)
        self._states: dict[EngineKey, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def give(self, address: EngineAddress, now: float) -> None:
        """Add an engine of the configuration, which is up once it was heard."""
        self._states[address.key] = _State(self._new(address, given=True), now, up=False)

    def heard(self, address: EngineAddress, now: float) -> bool | None:
        """An engine lives: whether it was not up before; None where there is no room for one more."""
        state = self._states.get(address.key)
        if state is None:
            if sum(not each.engine.given for each in self._states.values()) >= self._max_engines:
                return None
            self._states[address.key] = _State(self._new(address, given=False), now, up=True)
            return True
        if state.engine.address != address:
            state.engine = self._new(address, given=state.engine.given)
        came, state.heard_at, state.up, state.silent = not state.up, now, True, False
        return came

    def beat(self, heartbeat: Heartbeat, now: float) -> bool | None:
        """As `heard`; one that is leaving is forgotten, and none of those that came."""
        if not heartbeat.leaving:
            return self.heard(heartbeat.address, now)
        self._forget(heartbeat.address.key)
        return False

    def suspect(self, key: EngineKey) -> None:
        """Ask an engine no more until it is heard again: nobody answered at its address."""
        state = self._states.get(key)
        if state is not None and state.up:
            state.engine = self._new(state.engine.address, given=state.engine.given)
            state.up = False

    def expire(self, now: float) -> list[EngineKey]:
        """The engines that have been silent for too long since the last call; each is told once, and asked no more."""
        lost = []
        for key, state in list(self._states.items()):
            if now - state.heard_at >= self._timeout_s and not state.silent:
                state.silent = True
                lost.append(key)
                self._forget(key)
        return lost

    def up(self, role: Role) -> list[Engine]:
        """Those that may be asked, the ones first that were there first."""
        return [each.engine for key, each in self._states.items() if key.role is role and each.up]

    def given(self) -> list[EngineAddress]:
        """Those of the configuration, up or not."""
        return [each.engine.address for each in self._states.values() if each.engine.given]

    def _forget(self, key: EngineKey) -> None:
        state = self._states.get(key)
        if state is not None and state.engine.given:
            self.suspect(key)
        elif state is not None:
            del self._states[key]

    def _new(self, address: EngineAddress, *, given: bool) -> Engine:
        return Engine(next(self._serials), address, given)
