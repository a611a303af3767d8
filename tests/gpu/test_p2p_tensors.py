"""Tensors of real GPUs: over each carrier, on one GPU and on two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from p2p.sides import FEW, Sides, address_of, check_carrier, send_and_check
from serving.process import Side, Zygote, eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 1 << 20
MANY = 1000
CACHES = {"num_blocks": 64, "num_layers": 4}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


class Way(NamedTuple):
    """By which carrier, between which GPUs."""

    carrier: str
    gpus: tuple[int, int]


WAYS = [
    pytest.param(Way("ipc", (0, 0)), id="ipc-one_gpu"),
    pytest.param(Way("host", (0, 0)), id="host-one_gpu"),
    pytest.param(Way("ipc", (0, 1)), id="ipc-two_gpus", marks=TWO),
    pytest.param(Way("host", (0, 1)), id="host-two_gpus", marks=TWO),
    pytest.param(Way("nccl", (0, 1)), id="nccl-two_gpus", marks=TWO),
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


def start(sides: Sides, way: Way, which: int, **config: Any) -> Side:
    gpu = way.gpus[which]
    options: dict[str, Any] = {"kv_buffer_size": 256 * MIB, "carrier": way.carrier, "heartbeat_s": 2.0, **config}
    return sides.start(caches={**CACHES, "seed": which}, gpu=gpu, device=gpu, **options)


def check(receiver: Side, name: str, seed: int, **options: Any) -> dict[str, Any]:
    """It is what was sent, as a tensor of a GPU."""
    got = receiver.call("recv_tensor", name=name, seed=seed, **options)
    assert (got["equal"], got["device"]) == (True, "cuda")
    return got


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nbytes", [1, 3_000_001, 65 * MIB])
def test_there_and_back(sides: Sides, way: Way, nbytes: int) -> None:
    one, two = start(sides, way, 0), start(sides, way, 1)
    for turn, (sender, receiver) in enumerate(((one, two), (two, one))):
        for on_host in (False, True):
            name = f"{turn} {on_host}"
            sender.call("send_tensor", name=name, nbytes=nbytes, seed=turn, to=address_of(receiver), on_host=on_host)
            assert check(receiver, name, turn)["gpu"] == way.gpus[1 - turn]
            assert sender.call("wait", what=f"send {name}") == {"code": None}
    check_carrier(one, way.carrier)


@pytest.mark.parametrize("way", WAYS)
def test_into_tensors_of_ones_own(sides: Sides, way: Way) -> None:
    """On either side of the bus, after it has landed in the buffer and before it comes."""
    sender, receiver = start(sides, way, 0), start(sides, way, 1)
    there = address_of(receiver)
    for place in ("gpu", "host"):
        sender.call("send_tensor", name="t", nbytes=MIB, seed=4, to=there, on_host=False)
        assert sender.call("wait", what="send t") == {"code": None}
        assert receiver.call("recv_tensor", name="t", seed=4, into=[place, MIB])["equal"]
        receiver.ask("recv_tensor", name="u", seed=5, into=[place, MIB])
        sender.call("send_tensor", name="u", nbytes=MIB, seed=5, to=there, on_host=False)
        assert receiver.answer()["equal"]


@pytest.mark.parametrize("way", WAYS)
def test_a_full_buffer(sides: Sides, way: Way) -> None:
    """What does not fit goes into the pinned pool, where the GPU reads it; then senders wait."""
    part = MIB / (1 << 30)
    sender = start(sides, way, 0)
    receiver = start(sides, way, 1, kv_buffer_size=2 * MIB, mem_pool_size_gb=2 * part)
    for number in range(5):
        sender.call("send_tensor", name=f"{number}", nbytes=MIB, seed=number, to=address_of(receiver), on_host=False)
    for number in range(4):
        assert sender.call("wait", what=f"send {number}") == {"code": None}
    assert receiver.call("stats")["stats"]["used_bytes"] == {"buffer": 2 * MIB, "pool": 2 * MIB}
    assert not sender.call("done", what="send 4")["done"]
    got = [check(receiver, f"{number}", number, keep=True) for number in range(4)]
    assert [one["gpu"] for one in got] == [way.gpus[1]] * 2 + [-1] * 2
    assert not sender.call("done", what="send 4")["done"]
    receiver.call("drop")
    check(receiver, "4", 4)
    eventually(lambda: receiver.call("stats")["stats"]["used_bytes"] == {"buffer": 0, "pool": 0})


@pytest.mark.parametrize("way", WAYS)
def test_what_is_queued_on_streams_is_waited_for(sides: Sides, way: Way) -> None:
    """The source is written late; room is used again only once the GPU has done with what lay there."""
    sender, receiver = start(sides, way, 0), start(sides, way, 1, kv_buffer_size=MIB)
    sender.call("send_late", name="late", nbytes=MIB, seed=1, to=address_of(receiver))
    check(receiver, "late", 1, keep=True)
    receiver.call("use_late")
    sender.call("send_tensor", name="next", nbytes=MIB, seed=2, to=address_of(receiver), on_host=False)
    check(receiver, "next", 2)
    assert receiver.call("used", seed=1) == {"equal": True}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_allocated_for_a_tensor(sides: Sides, way: Way) -> None:
    """N2, N3: flat over 1,000 of them, as torch and the driver count it."""
    sender, receiver = start(sides, way, 0), start(sides, way, 1)

    def send(count: int) -> None:
        receiver.ask("recv_many", count=count)
        sender.call("send_many", count=count, nbytes=MIB, to=there, timeout_s=150)
        receiver.answer(150)

    there = address_of(receiver)
    send(20)
    before = receiver.call("gpu_bytes")
    send(MANY)
    after = receiver.call("gpu_bytes")
    assert after["allocated"] == before["allocated"]
    if way.gpus[0] != way.gpus[1]:  # else what the sender allocates for its tensors is free of the same GPU
        assert after["free"] == before["free"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_killed_with_tensors_on_their_way(sides: Sides, way: Way, dies: str) -> None:
    at = 0 if dies == "receiver" else 1
    survivor, bystander = start(sides, way, at), start(sides, way, 1 - at)
    for turn in range(3):
        victim = start(sides, way, 1 - at)
        sender, receiver = (survivor, victim) if dies == "receiver" else (victim, survivor)
        names = [f"{turn} {number}" for number in range(4)]
        for name in names:
            sender.call("send_tensor", name=name, nbytes=40 * MIB, seed=1, to=address_of(receiver), on_host=False)
        check(receiver, names[0], 1)
        victim.kill()
        if dies == "receiver":
            assert {sender.call("wait", what=f"send {name}")["code"] for name in names} <= {None, "peer_gone"}
        sender, receiver = (survivor, bystander) if dies == "receiver" else (bystander, survivor)
        sender.call("send_tensor", name=f"next {turn}", nbytes=MIB, seed=9, to=address_of(receiver), on_host=False)
        check(receiver, f"next {turn}", 9)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_and_tensors_over_one_session(sides: Sides, way: Way) -> None:
    one, two = start(sides, way, 0), start(sides, way, 1)
    for turn in range(5):
        one.call("send_tensor", name=f"t{turn}", nbytes=MIB, seed=turn, to=address_of(two), on_host=False)
        send_and_check(one, two, f"b{turn}")
        check(two, f"t{turn}", turn)
    one.call("send", name="late", blocks=FEW, to=address_of(two))
    eventually(lambda: two.call("stats")["stats"]["unclaimed"] == 1)
    assert two.call("stats")["stats"]["used_bytes"] == {"buffer": 0}


def test_to_an_engine_of_the_host(sides: Sides) -> None:
    """There it lies in host memory."""
    sender, receiver = sides.start(caches=CACHES, gpu=0, device=0), sides.start(caches=CACHES)
    sender.call("send_tensor", name="t", nbytes=9 * MIB, seed=1, to=address_of(receiver), on_host=False)
    got = receiver.call("recv_tensor", name="t", seed=1)
    assert (got["equal"], got["device"]) == (True, "cpu")
