"""Which engines there are, against a model that keeps nothing but what was said, and when."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.heartbeat import Heartbeat
from kvferry.router.registry import Registry
from router.router_pieces import address

TIMEOUT_S, MAX_ENGINES = 10.0, 3
GIVEN = [address("P", 101), address("D", 101)]
ENGINES = st.builds(address, st.sampled_from("PD"), st.integers(1, 3), kv=st.integers(1, 2)) | st.sampled_from(GIVEN)


def heard(registry: Registry, one: EngineAddress, now: float) -> bool | None:
    return registry.beat(Heartbeat(one, False), now)


def test_an_engine_is_there_once_it_answers_until_it_was_silent_for_too_long() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    one = address("D", 1)
    assert heard(registry, one, 100.0) is True
    assert registry.up(Role.DECODE) == []
    assert registry.to_probe(everyone=False) == [one]
    assert registry.answered(one.key, 101.0) is True
    assert registry.answered(one.key, 102.0) is False
    assert registry.to_probe(everyone=False) == []
    assert registry.to_probe(everyone=True) == [one]
    assert heard(registry, one, 103.0) is False
    registry.answered(one.key, 110.0)
    assert registry.expire(112.9) == []
    assert [engine.address for engine in registry.up(Role.DECODE)] == [one]
    assert registry.expire(113.0) == [one.key]
    assert registry.up(Role.DECODE) == []
    assert registry.expire(120.0) == []
    assert len(registry) == 0
    assert registry.answered(one.key, 121.0) is False


def test_an_answer_is_no_heartbeat_but_of_those_that_send_none() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    beats, given = address("D", 1), address("D", 2)
    registry.give(given, 0.0)
    heard(registry, beats, 0.0)
    for one in (beats, given):
        registry.answered(one.key, 9.0)
    assert registry.expire(11.0) == [beats.key]
    assert [engine.address for engine in registry.up(Role.DECODE)] == [given]


def test_an_engine_whose_server_hangs_is_lost_while_it_says_that_it_is_there() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    one = address("D", 1)
    heard(registry, one, 0.0)
    registry.answered(one.key, 1.0)
    for now in (5.0, 10.0, 15.0):
        heard(registry, one, now)
    assert registry.expire(10.9) == []
    assert registry.expire(11.0) == [one.key]
    assert registry.up(Role.DECODE) == []
    assert registry.expire(20.0) == []
    assert registry.to_probe(everyone=False) == [one]
    assert registry.answered(one.key, 21.0) is True
    assert [engine.address for engine in registry.up(Role.DECODE)] == [one]


def test_an_engine_that_moved_its_ranks_is_another() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    heard(registry, address("P", 1), 0.0)
    registry.answered(address("P", 1).key, 0.0)
    (before,) = registry.up(Role.PREFILL)
    assert heard(registry, address("P", 1, kv=2), 1.0) is True
    (after,) = registry.up(Role.PREFILL)
    assert (after.address.kv, after.serial > before.serial) == (("10.0.0.1:5000", "10.0.0.1:5001"), True)


def test_an_engine_that_nobody_could_reach_is_another_when_it_answers_again() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    heard(registry, address("P", 1), 0.0)
    registry.answered(address("P", 1).key, 0.0)
    (before,) = registry.up(Role.PREFILL)
    registry.suspect(before.key)
    assert heard(registry, address("P", 1), 1.0) is False
    assert registry.up(Role.PREFILL) == []
    assert registry.answered(before.key, 1.0) is True
    (after,) = registry.up(Role.PREFILL)
    assert after.serial != before.serial


def test_data_parallel_ranks_at_one_address_are_engines_of_their_own() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    for rank in (0, 1):
        one = address("D", 1, dp_rank=rank)
        heard(registry, one, 0.0)
        registry.answered(one.key, 0.0)
    assert [engine.key.dp_rank for engine in registry.up(Role.DECODE)] == [0, 1]


class RegistryMachine(RuleBasedStateMachine):
    """Engines come, beat, answer, leave, are suspected and fall silent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.registry = Registry(TIMEOUT_S, MAX_ENGINES)
        self.given = {one.key for one in GIVEN}
        self.heard_at: dict[EngineKey, float] = {}
        self.addresses: dict[EngineKey, EngineAddress] = {}
        self.up: set[EngineKey] = set()
        self.answered_at: dict[EngineKey, float] = {}
        for one in GIVEN:
            self.registry.give(one, self.now)
            self.heard_at[one.key], self.addresses[one.key] = self.now, one

    @rule(one=ENGINES, leaving=st.booleans())
    def beat(self, one: EngineAddress, leaving: bool) -> None:
        new = self.registry.beat(Heartbeat(one, leaving), self.now)
        if leaving:
            assert new is False
            self.up.discard(one.key)
            if one.key not in self.given:
                self.heard_at.pop(one.key, None)
        elif one.key not in self.heard_at and len(self.heard_at) - len(GIVEN) >= MAX_ENGINES:
            assert new is None
        else:
            assert new is (one.key not in self.heard_at or self.addresses[one.key] != one)
            self.heard_at[one.key], self.addresses[one.key] = self.now, one

    @rule(one=ENGINES)
    def answered(self, one: EngineAddress) -> None:
        came = self.registry.answered(one.key, self.now)
        assert came is (one.key in self.heard_at and one.key not in self.up)
        if one.key in self.heard_at:
            self.up.add(one.key)
            self.answered_at[one.key] = self.now
        if one.key in self.given:
            self.heard_at[one.key] = self.now

    @rule(one=ENGINES)
    def suspect(self, one: EngineAddress) -> None:
        self.registry.suspect(one.key)
        self.up.discard(one.key)

    @rule(passed_s=st.floats(0, 15))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        lost = set(self.registry.expire(self.now))
        silent = {key for key, at in self.heard_at.items() if self.now - at >= TIMEOUT_S}
        hang = {key for key in self.up if self.now - self.answered_at[key] >= TIMEOUT_S}
        assert lost <= silent | hang
        assert hang <= lost
        assert silent & self.up <= lost
        self.up -= lost
        for key in silent - self.given:
            del self.heard_at[key]

    @invariant()
    def it_has_those_that_were_heard(self) -> None:
        found = [engine for role in Role for engine in self.registry.up(role)]
        assert {engine.key for engine in found} == self.up
        assert all(engine.address == self.addresses[engine.key] for engine in found)
        assert len({engine.serial for engine in found}) == len(found)
        for everyone in (True, False):
            to_probe = {one.key for one in self.registry.to_probe(everyone=everyone)}
            assert to_probe == set(self.heard_at) - (set() if everyone else self.up)
        assert len(self.registry) == len(self.heard_at) <= MAX_ENGINES + len(GIVEN)


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRegistry = RegistryMachine.TestCase
