"""Blocks of GPUs over the host carrier, through slots of host memory: the driver's double, engines in processes."""

from __future__ import annotations

from typing import Any

import pytest

from p2p.sides import FEW, Sides, address_of, check_carrier, send_and_check
from serving.process import Side, eventually

SMALL = {"num_blocks": 32, "num_layers": 3}
LARGE = {"num_blocks": 600, "num_layers": 2, "heads": 16}  # 19 MiB a layer: more than all slots
WAYS = [(0, 1), (0, 0), (0, None), (None, 1)]  # GPUs; None: an engine of the host


def start(sides: Sides, gpu: int | None, seed: int, **config: Any) -> Side:
    caches = {**SMALL, "seed": seed, **config.pop("caches", {})}
    return sides.start(caches=caches, carrier="host", **({} if gpu is None else {"fake_gpu": gpu}), **config)


@pytest.mark.parametrize("gpus", WAYS)
def test_there_and_back(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    one, two = (start(sides, gpu, seed) for seed, gpu in enumerate(gpus))
    others = [block for block in range(32) if block not in FEW]
    before = two.call("digest", blocks=others)
    for turn in range(3):
        send_and_check(one, two, f"there {turn}")
        send_and_check(two, one, f"back {turn}")
    assert two.call("digest", blocks=others) == before
    check_carrier(one, "host")


@pytest.mark.parametrize("gpus", WAYS)
def test_more_than_the_slots_both_ways_at_once(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    one, two = (start(sides, gpu, seed, caches=LARGE) for seed, gpu in enumerate(gpus))
    halves = list(range(300)), list(range(300, 600))
    for side, other in ((one, two), (two, one)):
        side.call("receive", name="t", blocks=halves[1])
        other.call("send", name="t", blocks=halves[0], to=address_of(side))
    for side in (one, two):
        assert side.call("wait", what="receive t") == {"code": None}
        assert side.call("wait", what="send t") == {"code": None}
    assert one.call("digest", blocks=halves[1]) == two.call("digest", blocks=halves[0])
    assert two.call("digest", blocks=halves[1]) == one.call("digest", blocks=halves[0])


def test_both_ways_over_one_session(sides: Sides) -> None:
    """Sent, asked for, sent again: by the session that was opened to send."""
    one, two = (start(sides, gpu, gpu, caches=LARGE) for gpu in (0, 1))
    for turn in range(3):
        send_and_check(one, two, f"there {turn}")
        two.call("send", name=f"back {turn}", blocks=list(range(300)))
        one.call("receive", name=f"back {turn}", blocks=list(range(300, 600)), source=address_of(two))
        assert one.call("wait", what=f"receive back {turn}") == {"code": None}
        assert two.call("wait", what=f"send back {turn}") == {"code": None}
    assert one.call("digest", blocks=list(range(300, 600))) == two.call("digest", blocks=list(range(300)))
    assert len(one.call("stats")["stats"]["peers"]) == 1


@pytest.mark.parametrize("gpus", WAYS)
def test_sent_before_it_is_claimed(sides: Sides, gpus: tuple[int | None, int | None]) -> None:
    """On a GPU it stays at the sender, on the host it lands in the buffer; the first blocks can be skipped of both."""
    one, two = (start(sides, gpu, seed) for seed, gpu in enumerate(gpus))
    one.call("send", name="t", blocks=FEW, to=address_of(two))
    eventually(lambda: two.call("stats")["stats"]["unclaimed"] == 1)
    if gpus[1] is None:
        assert one.call("wait", what="send t") == {"code": None}
    two.call("receive", name="t", blocks=FEW[1:], skip_blocks=1)
    assert two.call("wait", what="receive t") == {"code": None}
    assert one.call("digest", blocks=FEW[1:]) == two.call("digest", blocks=FEW[1:])


def test_ranks_of_different_sizes(sides: Sides) -> None:
    """One rank of two heads on a GPU, two ranks of one head: each takes its head."""
    one = start(sides, 0, 1, caches={"heads": 2})
    halves = [start(sides, 1, 2 + rank, caches={"heads": 1}, tp_rank=rank, tp_size=2) for rank in range(2)]
    for half in halves:
        half.call("receive", name="there", blocks=FEW)
    one.call("send", name="there", blocks=FEW, to=[address_of(half) for half in halves])
    assert one.call("wait", what="send there") == {"code": None}
    for half in halves:
        assert half.call("wait", what="receive there") == {"code": None}
    back = [9, 8, 7, 6]
    one.call("receive", name="back", blocks=back, senders=2)
    for half in halves:
        half.call("send", name="back", blocks=FEW, to=address_of(one))
    assert one.call("wait", what="receive back") == {"code": None}
    assert one.call("digest", blocks=back) == one.call("digest", blocks=FEW)


def test_given_up_in_the_middle(sides: Sides) -> None:
    """By either side; the session goes on."""
    one, two = (start(sides, gpu, gpu, caches=LARGE) for gpu in (0, 1))
    blocks = list(range(600))
    for who, what in ((one, "send"), (two, "receive")):
        two.call("receive", name=what, blocks=blocks)
        one.call("send", name=what, blocks=blocks, to=address_of(two), layer_wise=True)
        one.call("layer_ready", name=what, layer=0)
        two.call("wait_layer", name=what, layer=0)
        one.call("layer_ready", name=what, layer=1)
        who.call("cancel", what=f"{what} {what}")
        codes = [one.call("wait", what=f"send {what}"), two.call("wait", what=f"receive {what}")]
        assert codes[0] == codes[1] or {"code": None} in codes  # it may have come to its end before
        send_and_check(one, two, f"after {what}")
    assert len(one.call("stats")["stats"]["peers"]) == 1


@pytest.mark.parametrize("dies", ["sender", "receiver"])
@pytest.mark.parametrize("gpus", WAYS)
def test_killed_in_mid_transfer(sides: Sides, gpus: tuple[int | None, int | None], dies: str) -> None:
    """N6."""
    survivor, bystander = start(sides, gpus[0], 1, caches=LARGE), start(sides, gpus[1], 2, caches=LARGE)
    blocks = list(range(600))
    for turn in range(3):
        victim = start(sides, gpus[1], 3, caches=LARGE)
        sender, receiver = (victim, survivor) if dies == "sender" else (survivor, victim)
        receiver.call("receive", name=f"t{turn}", blocks=blocks)
        sender.call("send", name=f"t{turn}", blocks=blocks, to=address_of(receiver), layer_wise=True)
        sender.call("layer_ready", name=f"t{turn}", layer=0)
        receiver.call("wait_layer", name=f"t{turn}", layer=0)
        sender.ask("layer_ready", name=f"t{turn}", layer=1)
        victim.kill()
        if dies == "receiver":
            sender.answer()
        what = f"send t{turn}" if dies == "receiver" else f"receive t{turn}"
        assert survivor.call("wait", what=what)["code"] in ("peer_gone", None)
        send_and_check(survivor, bystander, f"s{turn}")
        send_and_check(bystander, survivor, f"b{turn}")
    stats = survivor.call("stats")["stats"]
    assert (stats["sending"], stats["receiving"]) == (0, 0)
