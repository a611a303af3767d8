"""Ranks in processes of their own, over the double, and what becomes of one whose peer is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.nccl_side import both, join
from serving.process import Side, SideError, Zygote, eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


class Stage:
    """Starts sides, and ends those that are left."""

    def __init__(self, zygote: Zygote, so_file: Path) -> None:
        self._zygote = zygote
        self._so_file = str(so_file)
        self._sides: list[Side] = []

    def start(self, device: int, **env: str) -> Side:
        side = self._zygote.start("nccl", device=device, so_file=self._so_file, env=env)
        self._sides.append(side)
        return side

    def close(self) -> None:
        for side in self._sides:
            side.end()


@pytest.fixture
def stage(zygote: Zygote, nccl_so: Path) -> Iterator[Stage]:
    made = Stage(zygote, nccl_so)
    yield made
    made.close()


def check_moves(sender: Side, receiver: Side) -> None:
    for side in (sender, receiver):
        side.call("alloc", name="check", nbytes=MIB)
    sender.call("fill", name="check", seed=9)
    whole = [["check", 0, MIB]]
    both(sender, receiver, "exchange", {"sends": whole}, {"receives": whole})
    assert receiver.call("digest", name="check") == sender.call("digest", name="check")


def test_a_thousand_random_sizes(stage: Stage) -> None:
    first, second = stage.start(0), stage.start(1)
    join(first, second)
    first.call("alloc", name="m", nbytes=4 * MIB, seed=1)
    second.call("alloc", name="m", nbytes=4 * MIB)
    same = {"name": "m", "count": 1000, "seed": 3}
    ours, theirs = both(first, second, "random_sizes", {**same, "send": True}, {**same, "send": False})
    assert ours == theirs


def test_both_ways_at_once_a_hundred_times(stage: Stage) -> None:
    sides = stage.start(0), stage.start(1)
    join(*sides)
    for seed, side in enumerate(sides):
        side.call("alloc", name="out", nbytes=MIB, seed=seed)
        side.call("alloc", name="in", nbytes=MIB)
    ranges = {"count": 100, "sends": [["out", 0, MIB]], "receives": [["in", 0, MIB]]}
    both(*sides, "exchange", ranges, ranges)
    for side, other in (sides, sides[::-1]):
        assert side.call("digest", name="in") == other.call("digest", name="out")


@pytest.mark.parametrize("victim_sends", [False, True], ids=["receiver", "sender"])
def test_the_peer_is_killed_in_mid_transfer(stage: Stage, victim_sends: bool) -> None:
    """NCCL says nothing of it: who watches the peer does, and then an abort ends the transfer. The survivor goes on."""
    survivor = stage.start(0)
    held = []
    for seed in range(5):
        victim = stage.start(1, NCCL_DOUBLE_LOST_AT=str(MIB))
        kill_in_mid_transfer(survivor, victim, victim_sends=victim_sends, seed=seed)
        again = stage.start(1)
        join(survivor, again)
        check_moves(survivor, again)
        survivor.call("abort", reason="the round is over")
        again.end()
        held.append(survivor.call("held"))
    assert held[1:] == [held[1]] * 4


def kill_in_mid_transfer(survivor: Side, victim: Side, *, victim_sends: bool, seed: int) -> None:
    sender, receiver = (victim, survivor) if victim_sends else (survivor, victim)
    for side, value in ((sender, seed + 1), (receiver, 0)):
        side.call("alloc", name="m", nbytes=8 * MIB)
        side.call("fill", name="m", value=value)
    join(survivor, victim)
    sender.call("begin", sends=[["m", 0, 8 * MIB]])
    receiver.call("begin", receives=[["m", 0, 8 * MIB]])
    eventually(lambda: receiver.call("peek", name="m", offset=MIB // 2)["byte"] == seed + 1)
    victim.kill()
    assert survivor.call("running") == {"done": False, "error": None}
    assert survivor.call("abort", reason="engine 7 was killed")["seconds"] < 5
    assert survivor.call("running") == {"done": True, "error": "NcclPeerError"}
    assert survivor.call("stream_works")["works"]


def test_the_peer_dies_after_it_took_the_id(stage: Stage) -> None:
    first, other = stage.start(0), stage.start(2)
    unique_id = first.call("unique_id")["unique_id"]
    victim = stage.start(1)
    uuid = victim.call("uuid")["uuid"]
    victim.kill()
    began = time.monotonic()
    with pytest.raises(SideError, match="not connected"):
        first.call("connect", unique_id=unique_id, rank=0, peer_uuid=uuid, within_s=0.5)
    assert time.monotonic() - began < 5
    join(first, other)
    check_moves(first, other)


def test_who_made_the_id_dies(stage: Stage) -> None:
    victim, second = stage.start(0), stage.start(1)
    unique_id, uuid = victim.call("unique_id")["unique_id"], victim.call("uuid")["uuid"]
    victim.kill()
    with pytest.raises(SideError, match="not connected"):
        second.call("connect", unique_id=unique_id, rank=1, peer_uuid=uuid, within_s=0.5)
    third = stage.start(2)
    join(second, third)
    check_moves(second, third)
