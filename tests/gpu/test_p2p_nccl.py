"""The NCCL carrier on two real GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from p2p.sides import BIG, BLOCKS, FEW, Sides, address_of, begin, send_and_check
from serving.process import Side, Zygote, eventually

_NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_NUM_GPUS < 2, reason=f"needs 2 GPUs, sees {_NUM_GPUS}"),
]
LARGE = {"num_blocks": 600, "num_layers": 4, "heads": 64}  # 75 MiB a layer: more than two slots
DRIVER_MIB = 64  # what other things than communicators may take


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def sides(zygote: Zygote) -> Iterator[Sides]:
    made = Sides(zygote)
    yield made
    made.close()


def start(sides: Sides, gpu: int, caches: dict[str, int], seed: int) -> Side:
    return sides.start(caches={**caches, "seed": seed}, gpu=gpu, carrier="nccl", heartbeat_s=2.0)


def free_mib(gpu: int) -> int:
    return torch.cuda.mem_get_info(gpu)[0] >> 20


def test_shuffled_blocks_both_ways_at_once(sides: Sides) -> None:
    one, two = start(sides, 0, LARGE, 1), start(sides, 1, LARGE, 2)
    send_and_check(one, two, "first")
    halves = list(range(300)), list(range(300, 600))
    for turn in range(5):
        sources, targets = halves[0][:], halves[1][:]
        random.Random(turn).shuffle(sources)
        random.Random(turn + 100).shuffle(targets)
        for side, other in ((one, two), (two, one)):
            side.call("receive", name=f"{turn}", blocks=targets)
            other.call("send", name=f"{turn}", blocks=sources, to=address_of(side))
        for side in (one, two):
            assert side.call("wait", what=f"receive {turn}") == {"code": None}
            assert side.call("wait", what=f"send {turn}") == {"code": None}
        assert one.call("digest", blocks=targets) == two.call("digest", blocks=sources)
        assert two.call("digest", blocks=targets) == one.call("digest", blocks=sources)
    assert set(one.call("stats")["stats"]["peers"].values()) == {"nccl"}


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_killed_in_mid_transfer(sides: Sides, dies: str) -> None:
    """N6: the survivor has its error in time, serves others, and its GPU memory does not grow."""
    survivor, bystander = start(sides, 0, BIG, 1), start(sides, 1, BIG, 2)
    free = 0
    for turn in range(10):
        victim = start(sides, 1, BIG, 3)
        sender, receiver = (victim, survivor) if dies == "sender" else (survivor, victim)
        begin(sender, receiver, f"t{turn}")
        if dies == "receiver":
            sender.answer()
        victim.kill()
        what = f"send t{turn}" if dies == "receiver" else f"receive t{turn}"
        assert survivor.call("wait", what=what)["code"] in ("peer_gone", None)
        send_and_check(survivor, bystander, f"s{turn}")
        send_and_check(bystander, survivor, f"b{turn}")
        free = free or free_mib(0)
    eventually(lambda: free_mib(0) > free - DRIVER_MIB, 30)


def test_no_memory_is_taken_by_transfers(sides: Sides) -> None:
    one, two = start(sides, 0, BIG, 1), start(sides, 1, BIG, 2)
    for turn in range(3):
        send_and_check(one, two, f"warm {turn}")
    free = free_mib(0), free_mib(1)
    for turn in range(1000):
        two.call("receive", name=f"{turn}", blocks=BLOCKS)
        one.call("send", name=f"{turn}", blocks=BLOCKS, to=address_of(two))
        assert two.call("wait", what=f"receive {turn}") == {"code": None}
        assert one.call("wait", what=f"send {turn}") == {"code": None}
    assert (free_mib(0), free_mib(1)) == free
    assert one.call("digest", blocks=FEW) == two.call("digest", blocks=FEW)


def test_two_engines_on_one_gpu(sides: Sides) -> None:
    """N12: told so when they greet."""
    one, two = start(sides, 0, {"num_blocks": 64}, 1), start(sides, 0, {"num_blocks": 64}, 2)
    one.call("send", name="t", blocks=FEW, to=address_of(two))
    assert one.call("wait", what="send t") == {"code": "no_carrier"}
