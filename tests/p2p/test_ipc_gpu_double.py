"""The one-sided carrier over the double of the driver: engines on one GPU, and on two."""

from __future__ import annotations

import pytest

from p2p.sides import FEW, Sides, send_and_check
from serving.process import Side, eventually

SMALL = {"num_blocks": 32, "num_layers": 2}
LARGE = {"num_blocks": 16, "num_layers": 2, "heads": 64}  # 64 KiB of a block lie side by side


def calls(side: Side) -> dict[str, int]:
    counts: dict[str, int] = side.call("driver_calls")["calls"]
    return counts


def pair(sides: Sides, caches: dict[str, int], gpus: tuple[int, int]) -> tuple[Side, Side]:
    return (
        sides.start(caches={**caches, "seed": 1}, fake_gpu=gpus[0]),
        sides.start(caches={**caches, "seed": 2}, fake_gpu=gpus[1]),
    )


@pytest.mark.parametrize(
    ("caches", "gpus", "by"),
    [
        (SMALL, (0, 1), "cuLaunchKernel"),
        (LARGE, (0, 1), "cuLaunchKernel"),
        (SMALL, (0, 0), "cuLaunchKernel"),
        (LARGE, (0, 0), "cuMemcpyBatchAsync_v2"),  # where both use one GPU, the kernel would be in the engine's way
    ],
)
def test_who_copies(sides: Sides, caches: dict[str, int], gpus: tuple[int, int], by: str) -> None:
    sender, receiver = pair(sides, caches, gpus)
    before = calls(receiver).get(by, 0)
    send_and_check(sender, receiver, "t")
    assert set(receiver.call("stats")["stats"]["peers"].values()) == {"ipc"}
    counts = calls(receiver)
    assert counts.get(by, 0) > before
    assert counts.get("cuCtxEnablePeerAccess", 0) == 0  # which is of no use for memory of another process
    assert calls(sender).get("cuMemcpyBatchAsync_v2", 0) == 0  # nobody writes to a peer's memory
    send_and_check(receiver, sender, "back")


def test_unclaimed_blocks_stay_at_the_sender(sides: Sides) -> None:
    """The receive buffer is host memory: nothing lands there; the claim gets it all the same."""
    sender, receiver = pair(sides, SMALL, (0, 1))
    sender.call("send", name="t", blocks=FEW, to=receiver.call("address")["address"])
    eventually(lambda: receiver.call("stats")["stats"]["unclaimed"] == 1)
    assert receiver.call("stats")["stats"]["used_bytes"] == {"buffer": 0}
    assert not sender.call("done", what="send t")["done"]
    receiver.call("receive", name="t", blocks=FEW, timeout_s=30)
    assert receiver.call("wait", what="receive t") == {"code": None}
    assert sender.call("wait", what="send t") == {"code": None}
    assert receiver.call("digest", blocks=FEW) == sender.call("digest", blocks=FEW)


def open_handles(side: Side) -> int:
    counts = calls(side)
    return counts.get("cuIpcOpenMemHandle_v2", 0) - counts.get("cuIpcCloseMemHandle", 0)


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_a_peer_that_is_killed(sides: Sides, dies: str) -> None:
    """The survivor lets go of its memory, and serves others."""
    sender, receiver = pair(sides, SMALL, (0, 1))
    send_and_check(sender, receiver, "t")
    victim, survivor = (sender, receiver) if dies == "sender" else (receiver, sender)
    assert open_handles(survivor) == 2
    victim.kill()
    eventually(lambda: open_handles(survivor) == 0)
    other = sides.start(caches={**SMALL, "seed": 3}, fake_gpu=0)
    send_and_check(survivor, other, "next")


def test_a_gpu_and_the_host(sides: Sides) -> None:
    """A kernel cannot read the other's memory: the host carrier moves all, and both say what kept them from mapping."""
    sender = sides.start(caches={**SMALL, "seed": 1}, fake_gpu=0)
    receiver = sides.start(caches={**SMALL, "seed": 2, "shared": True})
    send_and_check(sender, receiver, "t")
    for side in (sender, receiver):
        (why,) = side.call("stats")["stats"]["fallbacks"].values()
        assert "not ipc" in why
        assert "on the host" in why


def test_a_gpu_and_the_host_where_nothing_else_is_allowed(sides: Sides) -> None:
    sender = sides.start(caches={**SMALL, "seed": 1}, fake_gpu=0, carrier="ipc")
    receiver = sides.start(caches={**SMALL, "seed": 2, "shared": True})
    sender.call("send", name="t", blocks=FEW, to=receiver.call("address")["address"])
    assert sender.call("wait", what="send t", timeout_s=20)["code"] == "no_carrier"
    problem = sender.call("problem", what="send t")["problem"]
    assert "not ipc" in problem
    assert "on the host" in problem
