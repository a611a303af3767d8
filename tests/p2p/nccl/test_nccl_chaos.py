"""Many communicators at once, ended at random moments: every future ends in time, and what went well is right."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvferry.errors import NcclPeerError, NcclStuckError
from kvferry.p2p.nccl import Communicator, NcclSettings
from nccl_ranks import WAIT_S, Memory, Ranks, ranks
from serving.process import eventually

KIB = 1 << 10
_NUM_RANKS = 3
_SLOTS = 24


class Pair:
    """Two communicators of one pair, and what was given to them."""

    def __init__(self, made: Ranks, chance: random.Random) -> None:
        sender, receiver = chance.sample(range(_NUM_RANKS), 2)
        self.sides: list[Communicator] = list(made.pair(sender, receiver))
        self.source = Memory(sender, _SLOTS * 64 * KIB, random=True)
        self.target = Memory(receiver, _SLOTS * 64 * KIB)
        self.futures: list[tuple[Future[None], int, int, bool]] = []

    def exchange(self, chance: random.Random, slot: int) -> None:
        at, nbytes = slot * 64 * KIB, chance.choice([1, 100, 64 * KIB])
        for is_send in chance.sample([True, False], 2):
            memory, side = (self.source, self.sides[0]) if is_send else (self.target, self.sides[1])
            ranges = [(memory.address + at, nbytes)]
            arguments = {"sends": ranges} if is_send else {"receives": ranges}
            self.futures.append((side.exchange(**arguments, timeout_s=15), at, nbytes, is_send))

    def check(self) -> int:
        """How many failed."""
        failed = 0
        source, target = self.source.read(), self.target.read()
        for future, at, nbytes, is_send in self.futures:
            error = future.exception(WAIT_S)
            if error is None:
                assert is_send or target[at : at + nbytes] == source[at : at + nbytes]
                continue
            assert isinstance(error, NcclPeerError)
            assert not isinstance(error, NcclStuckError)
            failed += 1
        return failed


@pytest.mark.parametrize("seed", range(3))
def test_ends_at_random_moments(nccl_so: Path, seed: int) -> None:
    chance = random.Random(seed)
    failed = 0
    with ranks(nccl_so, _NUM_RANKS, NcclSettings(end_timeout_s=10)) as made:
        for _ in range(6):
            pairs = [Pair(made, chance) for _ in range(3)]
            for slot in range(_SLOTS):
                for pair in chance.sample(pairs, 3):
                    pair.exchange(chance, slot)
                if chance.random() < 0.1:
                    time.sleep(0.002)
            ends = []
            for pair in pairs:
                if chance.random() < 0.7:
                    ends += [side.abort("by chance") for side in chance.sample(pair.sides, 2)]
                else:
                    ends += [side.close() for side in pair.sides]
            for end in ends:
                assert end.result(WAIT_S) is None
            failed += sum(pair.check() for pair in pairs)
        assert made.double.num_communicators == 0
        assert all(launcher.num_communicators == launcher.num_stuck == 0 for launcher in made.launchers)
        eventually(lambda: not made.driver.fake._streams)
    assert failed, "no end came while anything was under way: this test tests nothing"
