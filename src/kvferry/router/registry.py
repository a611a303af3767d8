"""Which engines there are, and which of them may be asked. Pure: the time comes in as an argument."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

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
    answered_at: float
    up: bool = False
    silent: bool = False  # it was reported as lost


class Registry:
    """All engines, by key. Not for several threads.

    An engine is up, which is to say that it may be asked, once its HTTP server was seen to answer, and as long as it
    does: engines say that they are there before it does, and where it hangs, or is gone, they may go on saying so.
    """

    def __init__(self, timeout_s: float, max_engines: int) -> None:
        """`timeout_s` is how long an engine may say nothing, or its HTTP server not answer; `max_engines` bounds those
        that come by heartbeat.
        """
        self._timeout_s = timeout_s
        self._max_engines = max_engines
        self._serials = itertools.count(1)
        self._states: dict[EngineKey, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def give(self, address: EngineAddress, now: float) -> None:
        """Add an engine of the configuration."""
        self._states[address.key] = _State(self._new(address, given=True), now, now)

    def beat(self, heartbeat: Heartbeat, now: float) -> bool | None:
        """An engine lives, or is leaving: whether it is a new one; None where there is no room for one more."""
        address = heartbeat.address
        if heartbeat.leaving:
            self._forget(address.key)
            return False
        state = self._states.get(address.key)
        if state is None:
            if sum(not each.engine.given for each in self._states.values()) >= self._max_engines:
                return None
            self._states[address.key] = _State(self._new(address, given=False), now, now)
            return True
        state.heard_at, state.silent = now, False
        if state.engine.address == address:
            return False
        state.engine = self._new(address, given=state.engine.given)
        return True

    def answered(self, key: EngineKey, now: float) -> bool:
        """An engine's HTTP server answers: whether it was not up before. One that is given is heard by that alone."""
        state = self._states.get(key)
        if state is None:
            return False
        state.answered_at = now
        if state.engine.given:
            state.heard_at, state.silent = now, False
        came, state.up = not state.up, True
        return came

    def suspect(self, key: EngineKey) -> None:
        """Ask an engine no more until it was seen to answer again: nobody was at its address, or its server hangs."""
        state = self._states.get(key)
        if state is not None and state.up:
            state.engine = self._new(state.engine.address, given=state.engine.given)
            state.up = False

    def expire(self, now: float) -> list[EngineKey]:
        """The engines that have been silent for too long since the last call; each is told once, and asked no more.

        One whose HTTP server alone is silent stays known: it may answer again.
        """
        lost = []
        for key, state in list(self._states.items()):
            if now - state.heard_at >= self._timeout_s and not state.silent:
                state.silent = True
                self._forget(key)
            elif state.up and now - state.answered_at >= self._timeout_s:
                self.suspect(key)
            else:
                continue
            lost.append(key)
        return lost

    def up(self, role: Role) -> list[Engine]:
        """Those that may be asked, the ones first that were there first."""
        return [each.engine for key, each in self._states.items() if key.role is role and each.up]

    def to_probe(self, *, everyone: bool) -> list[EngineAddress]:
        """Those whose health has to be looked at: now and then `everyone`, and at once those that are not up."""
        return [each.engine.address for each in self._states.values() if everyone or not each.up]

    def _forget(self, key: EngineKey) -> None:
        state = self._states.get(key)
        if state is not None and state.engine.given:
            self.suspect(key)
        elif state is not None:
            del self._states[key]

    def _new(self, address: EngineAddress, *, given: bool) -> Engine:
        return Engine(next(self._serials), address, given)
