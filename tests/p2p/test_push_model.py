"""What is pushed, under everything that can happen, in any order: whole and in its place or given up, nothing touched
after the end, nobody waits for ever, all buffers come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from p2p.push_world import Transfer, World


class PushMachine(RuleBasedStateMachine):
    """Little room, so that all gets in each other's way."""

    picks = st.integers(0, 1000)
    sizes = st.lists(st.sampled_from((0, 1, 7, 16, 64, 100, 600)), min_size=1, max_size=5).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(pick=picks, sizes=sizes, back=st.booleans(), now=st.booleans())
    def send(self, pick: int, sizes: tuple[int, ...], back: bool, now: bool) -> None:
        transfer = self.world.send(self.world.sessions[pick % 3], sizes, back=back)
        for item in range(len(sizes)) if now else ():
            self.world.ready(transfer, item)

    @precondition(lambda self: self.world.transfers)
    @rule(pick=picks, item=picks)
    def ready(self, pick: int, item: int) -> None:
        transfer = self.pick(pick)
        self.world.ready(transfer, item % len(transfer.source))

    @precondition(lambda self: self.world.transfers)
    @rule(pick=picks, source=st.booleans())
    def stop(self, pick: int, source: bool) -> None:
        self.world.stop(self.pick(pick), source=source)

    @rule(picks=st.lists(picks, max_size=20))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            actions = self.world.actions()
            if actions:
                actions[pick % len(actions)]()

    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.world.lose(self.world.sessions[pick % 3])

    @rule(pick=picks)
    def get_stuck(self, pick: int) -> None:
        """One at most: its engines have a second buffer for the others."""
        for place, session in enumerate(self.world.sessions):
            session.is_stuck = place == pick % 4

    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        """A copy does."""
        pending = [copies for engine in self.world.engines for copies in engine.copies if copies.pending]
        if pending:
            copies = pending[pick % len(pending)]
            self.world.transfers[copies.pending[0][0].run.number].session.is_broken = True
            copies.end(RuntimeError("it is broken"))

    @rule()
    def settle(self) -> None:
        self.world.settle()
        self.all_has_landed()

    def all_has_landed(self) -> None:
        """What was sent, and not given up, over sessions that go on."""
        for transfer in self.world.transfers.values():
            given_up = transfer.source_told or transfer.landing_told
            if transfer.session.is_up and not transfer.session.is_stuck and not given_up:
                assert transfer.landed == transfer.started

    def pick(self, pick: int) -> Transfer:
        return list(self.world.transfers.values())[-1 - pick % min(6, len(self.world.transfers))]

    def teardown(self) -> None:
        world = self.world
        for session in world.sessions:
            session.is_stuck = False
        self.settle()
        for transfer in world.transfers.values():
            world.stop(transfer, source=True)
            world.stop(transfer, source=False)
        world.settle()
        for transfer in world.transfers.values():
            assert transfer.released == bool(transfer.started)
            assert transfer.stopped or transfer.has_landed
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
        for session in list(world.sessions):
            world.lose(session)
        world.settle()
        assert not any(engine._outlets or engine._inlets for engine in world.engines)


TestPushes = PushMachine.TestCase
TestPushes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
