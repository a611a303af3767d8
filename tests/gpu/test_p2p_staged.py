"""Blocks of real GPUs over the host carrier, on one GPU, on two, and between a GPU and an engine of the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from p2p.sides import FEW, Sides, address_of, check_carrier, send_and_check
from serving.process import Side, Zygote

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LARGE = {"num_blocks": 600, "num_layers": 4, "heads": 64}  # 75 MiB a layer
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
WAYS = [
    pytest.param((0, 0), id="one_gpu"),
    pytest.param((0, 1), id="two_gpus", marks=TWO),
    pytest.param((0, None), id="to_the_host"),
    pytest.param((None, 0), id="from_the_host"),
]


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


def start(sides: Sides, gpu: int | None, seed: int, caches: dict[str, int] | None = None, **config: Any) -> Side:
    return sides.start(caches={**(caches or {}), "seed": seed}, gpu=gpu, carrier="host", **config)


@pytest.mark.parametrize("gpus", WAYS)
def test_both_ways_at_once(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    one, two = start(sides, gpus[0], 1, LARGE), start(sides, gpus[1], 2, LARGE)
    send_and_check(one, two, "first")
    halves = list(range(300)), list(range(300, 600))
    for side, other in ((one, two), (two, one)):
        side.call("receive", name="t", blocks=halves[1])
        other.call("send", name="t", blocks=halves[0][::-1], to=address_of(side))
    for side in (one, two):
        assert side.call("wait", what="receive t") == {"code": None}
        assert side.call("wait", what="send t") == {"code": None}
    assert one.call("digest", blocks=halves[1]) == two.call("digest", blocks=halves[0][::-1])
    assert two.call("digest", blocks=halves[1]) == one.call("digest", blocks=halves[0][::-1])
    check_carrier(one, "host")


@pytest.mark.parametrize("gpus", WAYS)
def test_the_first_blocks_are_skipped(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    one, two = start(sides, gpus[0], 1), start(sides, gpus[1], 2)
    others = [block for block in range(64) if block not in FEW[2:]]
    before = two.call("digest", blocks=others)
    two.call("receive", name="t", blocks=FEW[2:], skip_blocks=2)
    one.call("send", name="t", blocks=FEW, to=address_of(two))
    assert two.call("wait", what="receive t") == {"code": None}
    assert one.call("digest", blocks=FEW[2:]) == two.call("digest", blocks=FEW[2:])
    assert two.call("digest", blocks=others) == before


@pytest.mark.parametrize("gpus", WAYS)
def test_a_sender_that_withdraws(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    one, two = start(sides, gpus[0], 1), start(sides, gpus[1], 2)
    two.call("receive", name="t", blocks=FEW)
    one.call("withdraw", name="t", to=address_of(two))
    assert two.call("wait", what="receive t") == {"code": "withdrawn"}
    send_and_check(one, two, "next")


@pytest.mark.parametrize("gpus", WAYS)
@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_killed_in_mid_transfer(sides: Sides, gpus: tuple[int | None, int | None], dies: str) -> None:
    survivor, bystander = start(sides, gpus[0], 1, LARGE), start(sides, gpus[1], 2, LARGE)
    blocks = list(range(600))
    for turn in range(3):
        victim = start(sides, gpus[1], 3, LARGE)
        sender, receiver = (victim, survivor) if dies == "sender" else (survivor, victim)
        receiver.call("receive", name=f"t{turn}", blocks=blocks)
        sender.call("send", name=f"t{turn}", blocks=blocks, to=address_of(receiver), layer_wise=True)
        sender.call("layer_ready", name=f"t{turn}", layer=0)
        receiver.call("wait_layer", name=f"t{turn}", layer=0)
        for layer in (1, 2, 3):
            sender.call("layer_ready", name=f"t{turn}", layer=layer)
        victim.kill()
        what = f"send t{turn}" if dies == "receiver" else f"receive t{turn}"
        assert survivor.call("wait", what=what)["code"] in ("peer_gone", None)
        send_and_check(survivor, bystander, f"s{turn}")
        send_and_check(bystander, survivor, f"b{turn}")
