"""The engines of a running router: heard by heartbeat, asked for their health, lost, chosen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.balance import Balance
from kvferry.router.calls import CallFailedError, EngineCalls
from kvferry.router.config import RouterConfig, given_engines
from kvferry.router.connection import Outgoing
from kvferry.router.course import Course, Pair
from kvferry.router.heartbeat import Heartbeat
from kvferry.router.measures import Measures
from kvferry.router.registry import Engine, Registry
from kvferry.router.tasks import end_tasks

__all__ = ["Engines"]

_LOG = logging.getLogger(__name__)

_MAX_PROBE_S = 2.0
_LOOK_S = 0.25


class Engines:
    """Who is there. In the event loop's thread."""

    def __init__(self, config: RouterConfig, calls: EngineCalls, measures: Measures) -> None:
        self.balance = Balance()
        self._timeout_s = config.engine_timeout_s
        self._probe_s = min(_MAX_PROBE_S, config.engine_timeout_s / 4)
        self._calls = calls
        self._measures = measures
        self._new_one = asyncio.Event()
        self._registry = Registry(config.engine_timeout_s, config.max_engines)
        for address in given_engines(config):
            self._registry.give(address, time.monotonic())

    def up(self, role: Role) -> list[Engine]:
        """Those that may be asked."""
        return self._registry.up(role)

    def choose(self, course: Course) -> Pair | None:
        """Whom a request is to ask next; None where no decode engine is up."""
        return course.next(self.up(Role.PREFILL), self.up(Role.DECODE))

    def take(self, heartbeat: Heartbeat) -> None:
        """An engine said that it is there, or that it is leaving."""
        key = heartbeat.address.key
        came = self._registry.beat(heartbeat, time.monotonic())
        self._measures.count("heartbeats", "no_room" if came is None else "taken")
        if heartbeat.leaving:
            _LOG.info("%s is leaving", key)
        if came:
            self._new_one.set()

    def refused(self, outcome: str) -> None:
        """Something came where heartbeats are heard that was not taken; in the word that the measure has for it."""
        self._measures.count("heartbeats", outcome)

    def unreachable(self, key: EngineKey) -> None:
        """Nobody was at an engine's address."""
        self._registry.suspect(key)

    async def watch(self) -> None:
        """Look after those that are silent, until it is cancelled."""
        while True:
            for key in self._registry.expire(time.monotonic()):
                _LOG.warning("%s was silent for %g s", key, self._timeout_s)
                self._measures.count("engines_lost", key.role.name.lower())
                self._calls.lose(key, f"it was silent for {self._timeout_s:g} s")
            living = {role: self.up(role) for role in Role}
            for role, engines in living.items():
                self._measures.set("engines", len(engines), role.name.lower())
            self.balance.keep_only([engine for engines in living.values() for engine in engines])
            await asyncio.sleep(min(_LOOK_S, self._timeout_s / 4))

    async def probe(self) -> None:
        """Ask all for their health every 2 s, and those that are not up when there is a new one, until cancelled."""
        going_on: dict[EngineKey, asyncio.Task[None]] = {}
        round_at = time.monotonic()
        try:
            while True:
                self._new_one.clear()
                everyone = time.monotonic() >= round_at
                if everyone:
                    round_at = time.monotonic() + self._probe_s
                going_on = {key: task for key, task in going_on.items() if not task.done()}
                for address in self._registry.to_probe(everyone=everyone):
                    if address.key not in going_on:
                        going_on[address.key] = asyncio.create_task(self._probe(address))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._new_one.wait(), max(0.0, round_at - time.monotonic()))
        finally:
            await end_tasks(going_on.values())

    def counts(self) -> Mapping[str, int]:
        """How many of each kind are up."""
        return {role.name.lower(): len(self.up(role)) for role in Role}

    async def _probe(self, address: EngineAddress) -> None:
        try:
            with self._calls.call(address, Outgoing("GET", "/health", [])) as call:
                head = await asyncio.wait_for(call.head(), self._timeout_s / 2)
        except (CallFailedError, asyncio.TimeoutError) as error:
            _LOG.debug("%s has no health: %s", address.key, error)
            return
        if head.status == 200 and self._registry.answered(address.key, time.monotonic()):
            _LOG.info("%s has come", address.key, extra={"kv": address.kv, "legacy": address.legacy})
            self._measures.count("engines_joined", address.key.role.name.lower())
