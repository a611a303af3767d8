"""Tensors of GPUs, by the doubles of the driver and of NCCL: over each carrier, on two GPUs and on one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from doubles.nccl_double import build
from p2p.sides import FEW, Sides, address_of, send_and_check
from serving.process import Side, eventually

MIB = 1 << 20
SLOTS_OF_NCCL = 33 * MIB  # more than one
CACHES = {"num_blocks": 32, "num_layers": 2}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("nccl")))


class Way(NamedTuple):
    """By which carrier, between which GPUs (None: an engine of the host)."""

    carrier: str
    gpus: tuple[int | None, int | None]

    def start(self, sides: Sides, library: str, which: int, **config: Any) -> Side:
        gpu = self.gpus[which]
        caches = CACHES if self.carrier == "ipc" else None
        options: dict[str, Any] = {"kv_buffer_size": 64 * MIB, "carrier": self.carrier, **config}
        if gpu is None:
            return sides.start(caches=caches, **options)
        return sides.start(caches=caches, fake_gpu=gpu, device=gpu, nccl=library, **options)


WAYS = [
    Way("nccl", (0, 1)),
    Way("ipc", (0, 1)),
    Way("ipc", (0, 0)),
    Way("host", (0, 1)),
    Way("host", (1, 1)),
    Way("host", (None, 0)),
    Way("host", (0, None)),
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.carrier}-{way.gpus[0]}-{way.gpus[1]}")
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def check(receiver: Side, name: str, seed: int, nbytes: int, gpu: int | None, **options: Any) -> None:
    """It is what was sent, in memory of that GPU."""
    got = receiver.call("recv_tensor", name=name, seed=seed, **options)
    assert got == {"equal": True, "nbytes": nbytes, "gpu": -1 if gpu is None else gpu, "device": "cpu"}


@pytest.mark.parametrize("nbytes", [1, 3_000_001, SLOTS_OF_NCCL])
def test_there_and_back(sides: Sides, library: str, way: Way, nbytes: int) -> None:
    """From GPU and host memory, PUT and GET."""
    one, two = (way.start(sides, library, which) for which in (0, 1))
    for turn, (sender, receiver, gpu) in enumerate(((one, two, way.gpus[1]), (two, one, way.gpus[0]))):
        for on_host in (False, True):
            if way.gpus[turn] is None and not on_host:
                continue
            name = f"{turn} {on_host}"
            sender.call("send_tensor", name=name, nbytes=nbytes, seed=turn, to=address_of(receiver), on_host=on_host)
            check(receiver, name, turn, nbytes, gpu)
            assert sender.call("wait", what=f"send {name}") == {"code": None}
    assert set(one.call("stats")["stats"]["peers"].values()) == {way.carrier}
    eventually(lambda: receiver_is_empty(one) and receiver_is_empty(two))


def receiver_is_empty(side: Side) -> bool:
    used: dict[str, int] = side.call("stats")["stats"]["used_bytes"]
    return not any(used.values())


def test_asked_for(sides: Sides, library: str, way: Way) -> None:
    sender, receiver = (way.start(sides, library, which, send_type="GET") for which in (0, 1))
    sender.call("send_tensor", name="t", nbytes=MIB, seed=3, on_host=way.gpus[0] is None)
    check(receiver, "t", 3, MIB, way.gpus[1], source=address_of(sender))


def test_into_tensors_of_ones_own(sides: Sides, library: str, way: Way) -> None:
    """On either side of the bus, before it comes and after it has landed."""
    sender, receiver = (way.start(sides, library, which) for which in (0, 1))
    there = address_of(receiver)
    places = ["host"] if way.gpus[1] is None else ["host", "gpu"]
    for place in places:
        gpu = way.gpus[1] if place == "gpu" else None
        sender.call("send_tensor", name="t", nbytes=MIB, seed=4, to=there, on_host=way.gpus[0] is None)
        assert sender.call("wait", what="send t") == {"code": None}
        check(receiver, "t", 4, MIB, gpu, into=[place, MIB])
        receiver.ask("recv_tensor", name="u", seed=5, into=[place, MIB])
        sender.call("send_tensor", name="u", nbytes=MIB, seed=5, to=there)
        got = receiver.answer()
        assert (got["equal"], got["gpu"]) == (True, -1 if gpu is None else gpu)


def test_nothing_to_move(sides: Sides, library: str, way: Way) -> None:
    sender, receiver = (way.start(sides, library, which) for which in (0, 1))
    sender.call("send_tensor", name="t", nbytes=0, seed=0, to=address_of(receiver))
    assert receiver.call("recv_tensor", name="t", seed=0)["nbytes"] == 0
    assert sender.call("wait", what="send t") == {"code": None}


def test_a_full_buffer(sides: Sides, library: str, way: Way) -> None:
    """N3: what does not fit goes into the pool, then senders wait; a view's room is free when the view is gone."""
    part = MIB / (1 << 30)
    sender = way.start(sides, library, 0)
    receiver = way.start(sides, library, 1, kv_buffer_size=2 * MIB, mem_pool_size_gb=2 * part)
    for number in range(5):
        on_host = way.gpus[0] is None
        name = f"{number}"
        sender.call("send_tensor", name=name, nbytes=MIB, seed=number, to=address_of(receiver), on_host=on_host)
    for number in range(4):
        assert sender.call("wait", what=f"send {number}") == {"code": None}
    assert receiver.call("stats")["stats"]["used_bytes"] == {"buffer": 2 * MIB, "pool": 2 * MIB}
    assert not sender.call("done", what="send 4")["done"]
    in_buffer = -1 if way.gpus[1] is None else way.gpus[1]
    got = [receiver.call("recv_tensor", name=f"{number}", seed=number, keep=True) for number in range(4)]
    assert all(one["equal"] for one in got)
    assert [one["gpu"] for one in got] == [in_buffer] * 2 + [-1] * 2  # the pool is pinned: the GPU reads it where it is
    assert not sender.call("done", what="send 4")["done"]
    receiver.call("drop")
    check(receiver, "4", 4, MIB, way.gpus[1])


def test_nothing_is_allocated_for_a_tensor(sides: Sides, library: str, way: Way) -> None:
    sender, receiver = (way.start(sides, library, which) for which in (0, 1))
    if way.gpus[1] is None:
        pytest.skip("the double counts what an engine on a GPU does")

    def send(turn: int) -> None:
        sender.call("send_tensor", name=f"{turn}", nbytes=MIB, seed=turn, to=address_of(receiver))
        check(receiver, f"{turn}", turn, MIB, way.gpus[1])

    send(0)
    names = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostRegister_v2", "cuStreamCreateWithPriority")
    before = receiver.call("driver_calls")["calls"]
    for turn in range(1, 20):
        send(turn)
    after = receiver.call("driver_calls")["calls"]
    assert {name: after.get(name) for name in names} == {name: before.get(name) for name in names}


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_killed_with_tensors_on_their_way(sides: Sides, library: str, way: Way, dies: str) -> None:
    """The survivor is told, its room comes back, and others are served."""
    survivor_at = 0 if dies == "receiver" else 1
    survivor = way.start(sides, library, survivor_at, heartbeat_s=2.0)
    others = [way.start(sides, library, 1 - survivor_at) for _ in range(2)]
    victim = others[0]
    sender, receiver = (survivor, victim) if dies == "receiver" else (victim, survivor)
    for number in range(6):
        on_host = way.gpus[0] is None
        name = f"{number}"
        sender.call("send_tensor", name=name, nbytes=9 * MIB, seed=number, to=address_of(receiver), on_host=on_host)
    check(receiver, "0", 0, 9 * MIB, way.gpus[1])
    victim.kill()
    if dies == "receiver":
        for number in range(1, 6):
            assert sender.call("wait", what=f"send {number}")["code"] in (None, "peer_gone")
    next_sender, next_receiver = (survivor, others[1]) if dies == "receiver" else (others[1], survivor)
    next_sender.call("send_tensor", name="next", nbytes=MIB, seed=9, to=address_of(next_receiver))
    check(next_receiver, "next", 9, MIB, way.gpus[1])


def test_blocks_and_tensors_together(sides: Sides, library: str) -> None:
    """Over one session, as a connector uses them; unclaimed blocks of a GPU stay at the sender."""
    one, two = (
        sides.start(caches={**CACHES, "seed": gpu}, fake_gpu=gpu, device=gpu, nccl=library, carrier="nccl")
        for gpu in (0, 1)
    )
    one.call("send_tensor", name="t", nbytes=MIB, seed=1, to=address_of(two), on_host=False)
    send_and_check(one, two, "blocks")
    check(two, "t", 1, MIB, 1)
    one.call("send", name="late", blocks=FEW, to=address_of(two))
    eventually(lambda: two.call("stats")["stats"]["unclaimed"] == 1)
    assert two.call("stats")["stats"]["used_bytes"] == {"buffer": 0}
