"""The one-sided carrier on real GPUs: two engines on one, and on two."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from p2p.sides import BIG, BLOCKS, FEW, Sides, address_of, begin, check_carrier, send_and_check
from serving.process import Zygote, eventually, freeze

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

_NUM_GPUS = torch.cuda.device_count()
SMALL = {"num_blocks": 64, "num_layers": 4}  # 2 KiB of a block lie side by side
LARGE = {"num_blocks": 64, "num_layers": 4, "heads": 64}  # 64 KiB
PLACES = [
    pytest.param((0, 0), id="one_gpu"),
    pytest.param(
        (0, 1), id="two_gpus", marks=pytest.mark.skipif(_NUM_GPUS < 2, reason=f"needs 2 GPUs, sees {_NUM_GPUS}")
    ),
]
BACK_S = 5.0  # 0.5 s are promised; the machine may be busy


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


def free_bytes(gpu: int) -> int:
    return torch.cuda.mem_get_info(gpu)[0]


@pytest.mark.parametrize("gpus", PLACES)
@pytest.mark.parametrize("caches", [SMALL, LARGE])
def test_shuffled_blocks_both_ways(sides: Sides, gpus: tuple[int, int], caches: dict[str, int]) -> None:
    first = sides.start(caches={**caches, "seed": 1}, gpu=gpus[0])
    second = sides.start(caches={**caches, "seed": 2}, gpu=gpus[1])
    others = [block for block in range(64) if block not in FEW]
    before = second.call("digest", blocks=others)
    send_and_check(first, second, "there")
    check_carrier(first, "ipc")
    assert second.call("digest", blocks=others) == before
    all_blocks = list(range(64))
    there, back = all_blocks[:], all_blocks[:]
    random.Random(1).shuffle(there)
    random.Random(2).shuffle(back)
    first.call("receive", name="back", blocks=back, timeout_s=30)
    second.call("send", name="back", blocks=there, to=address_of(first))
    assert first.call("wait", what="receive back") == {"code": None}
    assert second.call("wait", what="send back") == {"code": None}
    assert first.call("digest", blocks=back) == second.call("digest", blocks=there)


@pytest.mark.parametrize("gpus", PLACES)
def test_what_is_queued_on_the_stream_is_waited_for(sides: Sides, gpus: tuple[int, int]) -> None:
    """On both sides: the source is written late, and so are the blocks that it lands in."""
    sender = sides.start(caches={**SMALL, "seed": 1}, gpu=gpus[0])
    receiver = sides.start(caches={**SMALL, "seed": 2}, gpu=gpus[1])
    send_and_check(sender, receiver, "first")
    receiver.call("write_late", blocks=FEW, value=3.0)
    receiver.call("receive", name="t", blocks=FEW, timeout_s=30)
    sender.call("write_late", blocks=FEW, value=5.0)
    sender.call("send", name="t", blocks=FEW, to=address_of(receiver))
    assert receiver.call("wait", what="receive t") == {"code": None}
    assert receiver.call("values", blocks=FEW) == {"values": [5.0]}


@pytest.mark.parametrize("gpus", PLACES)
def test_senders_killed_in_mid_transfer(sides: Sides, gpus: tuple[int, int]) -> None:
    receiver = sides.start(caches={**BIG, "seed": 1}, gpu=gpus[1])
    bystander = sides.start(caches={**BIG, "seed": 2}, gpu=gpus[0])
    send_and_check(bystander, receiver, "first")
    receiver.call("digest", blocks=BLOCKS)  # what torch keeps for that is not given back
    free = free_bytes(gpus[0])
    dice = random.Random(6)
    for turn in range(10):
        victim = sides.start(caches={**BIG, "seed": 3}, gpu=gpus[0])
        begin(victim, receiver, f"t{turn}")
        time.sleep(dice.random() * 0.002)
        victim.kill()
        assert receiver.call("wait", what=f"receive t{turn}", timeout_s=10)["code"] in ("peer_gone", None)
        eventually(lambda: free_bytes(gpus[0]) >= free - (32 << 20), BACK_S)
        digest = receiver.call("digest", blocks=BLOCKS)
        send_and_check(bystander, receiver, f"s{turn}")
        assert receiver.call("digest", blocks=BLOCKS) == digest
    check_carrier(receiver, "ipc")


@pytest.mark.parametrize("gpus", PLACES)
def test_receivers_killed_in_mid_transfer(sides: Sides, gpus: tuple[int, int]) -> None:
    sender = sides.start(caches={**BIG, "seed": 1}, gpu=gpus[0])
    bystander = sides.start(caches={**BIG, "seed": 2}, gpu=gpus[1])
    send_and_check(sender, bystander, "first")
    free = free_bytes(gpus[1])
    dice = random.Random(7)
    for turn in range(10):
        victim = sides.start(caches={**BIG, "seed": 3}, gpu=gpus[1])
        begin(sender, victim, f"t{turn}")
        time.sleep(dice.random() * 0.002)
        victim.kill()
        sender.answer()
        assert sender.call("wait", what=f"send t{turn}", timeout_s=10)["code"] in ("peer_gone", None)
        eventually(lambda: free_bytes(gpus[1]) >= free - (32 << 20), BACK_S)
        send_and_check(sender, bystander, f"s{turn}")
    check_carrier(sender, "ipc")


@pytest.mark.parametrize("gpus", PLACES)
def test_a_reader_that_stops_while_its_lease_runs_out(sides: Sides, gpus: tuple[int, int]) -> None:
    sender = sides.start(caches={**BIG, "seed": 1}, gpu=gpus[0], lease_s=2.0, heartbeat_s=30)
    reader = sides.start(caches={**BIG, "seed": 2}, gpu=gpus[1], heartbeat_s=30)
    reader.call("receive", name="t", blocks=BLOCKS, timeout_s=60)
    sender.call("send", name="t", blocks=BLOCKS, to=address_of(reader), layer_wise=True)
    sender.call("layer_ready", name="t", layer=0)
    reader.call("wait_layer", name="t", layer=0)
    freeze(reader.pid)
    for layer in (1, 2, 3):
        sender.call("layer_ready", name="t", layer=layer)
    eventually(lambda: sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 1, 20)
    assert not sender.call("done", what="send t")["done"]
    os.kill(reader.pid, signal.SIGCONT)
    assert sender.call("wait", what="send t", timeout_s=20)["code"] == "expired"
    assert reader.call("wait", what="receive t", timeout_s=20)["code"] == "expired"
    send_and_check(sender, reader, "next")


@pytest.mark.parametrize("gpus", PLACES)
def test_nothing_is_allocated_for_a_transfer(sides: Sides, gpus: tuple[int, int]) -> None:
    sender = sides.start(caches={**SMALL, "seed": 1}, gpu=gpus[0])
    receiver = sides.start(caches={**SMALL, "seed": 2}, gpu=gpus[1])
    for turn in range(10):
        send_and_check(sender, receiver, f"warm {turn}")
    free = [free_bytes(gpu) for gpu in gpus]
    for turn in range(1000):
        send_and_check(sender, receiver, f"t{turn}")
    assert [free_bytes(gpu) for gpu in gpus] == free
