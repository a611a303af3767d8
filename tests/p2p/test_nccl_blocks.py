"""Blocks over the NCCL carrier: the doubles of the driver and of NCCL, engines in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doubles.nccl_double import build
from p2p.sides import FEW, Sides, address_of, send_and_check
from serving.process import Side, eventually, freeze

SMALL = {"num_blocks": 32, "num_layers": 3}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("nccl")))


def start(sides: Sides, library: str, gpu: int, seed: int, **config: Any) -> Side:
    """An engine on one of the double's GPUs that uses nothing but NCCL."""
    caches = {**SMALL, "seed": seed, **config.pop("caches", {})}
    return sides.start(caches=caches, fake_gpu=gpu, nccl=library, **{"carrier": "nccl", **config})


def test_there_and_back(sides: Sides, library: str) -> None:
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    for turn in range(3):
        send_and_check(one, two, f"there {turn}")
        send_and_check(two, one, f"back {turn}")
    assert set(one.call("stats")["stats"]["peers"].values()) == {"nccl"}


def test_both_ways_at_once(sides: Sides, library: str) -> None:
    """N4: each direction has a communicator of its own, and nothing is launched before both sides can."""
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    for turn in range(10):
        for side, other in ((one, two), (two, one)):
            side.call("receive", name=f"{turn}", blocks=FEW)
            other.call("send", name=f"{turn}", blocks=[9, 8, 7, 6], to=address_of(side))
        for side in (one, two):
            assert side.call("wait", what=f"receive {turn}") == {"code": None}
            assert side.call("wait", what=f"send {turn}") == {"code": None}
    assert one.call("digest", blocks=FEW) == two.call("digest", blocks=[9, 8, 7, 6])
    assert two.call("digest", blocks=FEW) == one.call("digest", blocks=[9, 8, 7, 6])


def test_asked_for(sides: Sides, library: str) -> None:
    """The acceptor of the session sends."""
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    one.call("send", name="t", blocks=FEW)
    two.call("receive", name="t", blocks=FEW, source=address_of(one))
    assert two.call("wait", what="receive t") == {"code": None}
    assert one.call("wait", what="send t") == {"code": None}
    assert one.call("digest", blocks=FEW) == two.call("digest", blocks=FEW)


def test_two_engines_on_one_gpu(sides: Sides, library: str) -> None:
    """N12: told so when they greet."""
    one, two = start(sides, library, 0, 1), start(sides, library, 0, 2)
    one.call("send", name="t", blocks=FEW, to=address_of(two))
    assert one.call("wait", what="send t") == {"code": "no_carrier"}


def test_other_numbers_of_channels(sides: Sides, library: str) -> None:
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2, nccl_num_channels=4)
    two.call("receive", name="t", blocks=FEW)
    one.call("send", name="t", blocks=FEW, to=address_of(two))
    assert one.call("wait", what="send t") == {"code": "nccl"}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_killed_in_mid_transfer(sides: Sides, library: str, dies: str) -> None:
    """N6: 5 times; NCCL itself never notices, the link does."""
    survivor, bystander = start(sides, library, 0, 1), start(sides, library, 1, 2)
    for turn in range(5):
        victim = start(sides, library, 1, 3)
        sender, receiver = (victim, survivor) if dies == "sender" else (survivor, victim)
        receiver.call("receive", name=f"t{turn}", blocks=FEW)
        sender.call("send", name=f"t{turn}", blocks=FEW, to=address_of(receiver), layer_wise=True)
        sender.call("layer_ready", name=f"t{turn}", layer=0)
        receiver.call("wait_layer", name=f"t{turn}", layer=0)
        freeze(receiver.pid if dies == "receiver" else sender.pid)
        if dies == "receiver":
            sender.call("layer_ready", name=f"t{turn}", layer=1)
        victim.kill()
        what = f"send t{turn}" if dies == "receiver" else f"receive t{turn}"
        assert survivor.call("wait", what=what) == {"code": "peer_gone"}
        send_and_check(survivor, bystander, f"s{turn}")
        send_and_check(bystander, survivor, f"b{turn}")
    stats = survivor.call("stats")["stats"]
    assert (stats["sending"], stats["receiving"]) == (0, 0)


def test_set_up_that_hangs(sides: Sides, library: str) -> None:
    """N5: it ends in time, and other peers are served meanwhile."""
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    stuck = start(sides, library, 1, 3, nccl_env={"NCCL_DOUBLE_HANG": "init"})
    stuck.call("receive", name="t", blocks=FEW)
    one.call("send", name="t", blocks=FEW, to=address_of(stuck))
    send_and_check(one, two, "meanwhile")
    assert one.call("wait", what="send t", within_s=38) == {"code": "nccl"}


def test_given_up_in_the_middle(sides: Sides, library: str) -> None:
    """By either side; the session goes on."""
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    for who, what in ((one, "send"), (two, "receive")):
        name = f"given up by {what}"
        two.call("receive", name=name, blocks=FEW)
        one.call("send", name=name, blocks=FEW, to=address_of(two), layer_wise=True)
        one.call("layer_ready", name=name, layer=0)
        two.call("wait_layer", name=name, layer=0)
        one.call("layer_ready", name=name, layer=1)
        who.call("cancel", what=f"{what} {name}")
        for side, part in ((one, "send"), (two, "receive")):
            assert side.call("wait", what=f"{part} {name}") == {"code": "cancelled"}
        send_and_check(one, two, f"after {what}")
    eventually(lambda: len(one.call("stats")["stats"]["peers"]) == 1)


def test_more_than_a_ring(sides: Sides, library: str) -> None:
    """Layers of several slots, and more of them than there are."""
    large = {"num_blocks": 600, "num_layers": 3, "heads": 64}  # 75 MiB a layer
    blocks = list(range(600))
    one, two = (start(sides, library, gpu, gpu + 1, caches=large) for gpu in (0, 1))
    two.call("receive", name="t", blocks=blocks)
    one.call("send", name="t", blocks=blocks, to=address_of(two))
    assert one.call("wait", what="send t") == {"code": None}
    assert two.call("wait", what="receive t") == {"code": None}
    assert one.call("digest", blocks=blocks) == two.call("digest", blocks=blocks)


def test_closing_leaves_nothing(sides: Sides, library: str, tmp_path: Path) -> None:
    one, two = start(sides, library, 0, 1), start(sides, library, 1, 2)
    send_and_check(one, two, "t")
    two.end()
    eventually(lambda: one.call("stats")["stats"]["peers"] == {})
    one.end()
