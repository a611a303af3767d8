"""What is pushed, under everything that can happen, in any order: whole and in its place or given up, nothing touched
after the end, nobody waits for ever, all buffers come back."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.push_world import ENGINES, World

SIZES = (0, 1, 7, 30, 64, 100, 600)
STEPS = 40


class Players:
    """They send, give up and break things, by chance. Little room, so that all gets in each other's way."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World()

    def play(self) -> None:
        acts = [self.send, self.ready, self.stop, self.lose, self.get_stuck, self.fail, self.go_on]
        for act in self.chance.choices(acts, weights=[8, 4, 8, 1, 1, 2, 20], k=STEPS):
            act()

    def send(self) -> None:
        """From one engine to the others, or to it, over its four sessions: it has two buffers for that."""
        engine, out = self.chance.randrange(ENGINES), self.chance.random() < 0.5
        sizes = tuple(self.chance.choices(SIZES, k=self.chance.randint(1, 4)))
        items = range(self.chance.choice([0, len(sizes)]))
        for session in self.world.sessions:
            if engine in session.engines:
                transfer = self.world.send(session, sizes, sender=engine if out else session.other(engine))
                for item in items:
                    self.world.ready(transfer, item)

    def ready(self) -> None:
        for transfer in self.world.last_ones():
            self.world.ready(transfer, self.chance.randrange(len(transfer.source)))

    def stop(self) -> None:
        for transfer in self.world.last_ones():
            if self.chance.random() < 0.2:
                self.world.stop(transfer, source=self.chance.random() < 0.5)

    def lose(self) -> None:
        self.world.lose(self.chance.choice(self.world.sessions))

    def get_stuck(self) -> None:
        """One session, or none: its engines have a second buffer for the others."""
        stuck = self.chance.choice([*self.world.sessions, None])
        for session in self.world.sessions:
            session.is_stuck = session is stuck

    def fail(self) -> None:
        """A copy does, that others are behind."""
        pending = [copies for engine in self.world.engines for copies in engine.copies if len(copies.pending) > 1]
        if pending:
            copies = self.chance.choice(pending)
            self.world.transfers[copies.pending[0][0].run.number].session.is_broken = True
            copies.end(RuntimeError("it is broken"))

    def go_on(self) -> None:
        for _ in range(self.chance.randint(1, 60)):
            actions = self.world.actions()
            if actions:
                self.chance.choice(actions)()


def check_all_has_landed(world: World) -> None:
    """What was sent, and not given up, over sessions that go on."""
    for transfer in world.transfers.values():
        given_up = transfer.source_told or transfer.landing_told
        if transfer.session.is_up and not transfer.session.is_stuck and not given_up:
            assert transfer.landed == transfer.started


def check_nothing_is_left(world: World) -> None:
    for engine in world.engines:
        for buffers in (engine._send_buffers, engine._receive_buffers):
            assert len(buffers._free) == 2
            assert not buffers._lent
            assert not buffers._waiting
        assert not engine._by_number
        for outlet in engine._outlets.values():
            assert not any((outlet.queue, outlet.reading, outlet._stopping))
        for inlet in engine._inlets.values():
            assert not inlet.expected
            assert inlet._pipe is None or not inlet._pipe._writing


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 60))
def test_pushes(seed: int) -> None:
    players = Players(seed)
    world = players.world
    players.play()
    world.settle()
    check_all_has_landed(world)
    for session in world.sessions:
        session.is_stuck = False
    world.settle()
    check_all_has_landed(world)
    for transfer in world.transfers.values():
        world.stop(transfer, source=True)
        world.stop(transfer, source=False)
    world.settle()
    for transfer in world.transfers.values():
        assert transfer.released == bool(transfer.started)
        assert transfer.stopped or transfer.has_landed
    check_nothing_is_left(world)
    for session in list(world.sessions):
        world.lose(session)
    world.settle()
    assert not any(engine._outlets or engine._inlets for engine in world.engines)
