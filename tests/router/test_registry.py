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


def test_an_engine_is_there_until_it_was_silent_for_too_long() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    one = address("D", 1)
    assert registry.heard(one, 100.0) is True
    assert registry.heard(one, 103.0) is False
    assert registry.expire(112.9) == []
    assert [engine.address for engine in registry.up(Role.DECODE)] == [one]
    assert registry.expire(113.0) == [one.key]
    assert registry.up(Role.DECODE) == []
    assert registry.expire(120.0) == []
    assert len(registry) == 0


def test_an_engine_that_moved_its_ranks_is_another() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    registry.heard(address("P", 1), 0.0)
    (before,) = registry.up(Role.PREFILL)
    registry.heard(address("P", 1, kv=2), 1.0)
    (after,) = registry.up(Role.PREFILL)
    assert (after.address.kv, after.serial > before.serial) == (("10.0.0.1:5000", "10.0.0.1:5001"), True)


def test_an_engine_that_nobody_could_reach_is_another_when_it_is_heard_again() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    registry.heard(address("P", 1), 0.0)
    (before,) = registry.up(Role.PREFILL)
    registry.suspect(before.key)
    assert registry.up(Role.PREFILL) == []
    assert registry.heard(address("P", 1), 1.0) is True
    (after,) = registry.up(Role.PREFILL)
    assert after.serial != before.serial


def test_data_parallel_ranks_at_one_address_are_engines_of_their_own() -> None:
    registry = Registry(TIMEOUT_S, MAX_ENGINES)
    for rank in (0, 1):
        registry.heard(address("D", 1, dp_rank=rank), 0.0)
    assert [engine.key.dp_rank for engine in registry.up(Role.DECODE)] == [0, 1]


class RegistryMachine(RuleBasedStateMachine):
    """Engines come, beat, leave, are suspected and fall silent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.registry = Registry(TIMEOUT_S, MAX_ENGINES)
        self.heard_at: dict[EngineKey, float] = {}
        self.kv: dict[EngineKey, EngineAddress] = {one.key: one for one in GIVEN}
        self.up: set[EngineKey] = set()
        for one in GIVEN:
            self.registry.give(one, self.now)
            self.heard_at[one.key] = self.now

    @rule(one=ENGINES, leaving=st.booleans())
    def beat(self, one: EngineAddress, leaving: bool) -> None:
        is_given = one.key in {each.key for each in GIVEN}
        came = self.registry.beat(Heartbeat(one, leaving), self.now)
        if leaving:
            assert came is False
            self.up.discard(one.key)
            if not is_given:
                self.heard_at.pop(one.key, None)
        elif one.key not in self.heard_at and len(self.heard_at) - len(GIVEN) >= MAX_ENGINES:
            assert came is None
        else:
            assert came is (one.key not in self.up)
            self.heard_at[one.key], self.kv[one.key] = self.now, one
            self.up.add(one.key)

    @rule(one=ENGINES)
    def suspect(self, one: EngineAddress) -> None:
        self.registry.suspect(one.key)
        self.up.discard(one.key)

    @rule(passed_s=st.floats(0, 15))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        lost = set(self.registry.expire(self.now))
        silent = {key for key, at in self.heard_at.items() if self.now - at >= TIMEOUT_S}
        assert lost <= silent
        assert silent & self.up <= lost
        self.up -= silent
        for key in silent - {each.key for each in GIVEN}:
            del self.heard_at[key]

    @invariant()
    def it_has_those_that_were_heard(self) -> None:
        found = [engine for role in Role for engine in self.registry.up(role)]
        assert {engine.key for engine in found} == self.up
        assert all(engine.address == self.kv[engine.key] for engine in found)
        assert len({engine.serial for engine in found}) == len(found)
        assert [one.key for one in self.registry.given()] == [one.key for one in GIVEN]
        assert len(self.registry) == len(self.heard_at) <= MAX_ENGINES + len(GIVEN)


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRegistry = RegistryMachine.TestCase
