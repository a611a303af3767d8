"""NCCL itself: alone on one GPU as far as that goes, and between two processes on two GPUs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from doubles.nccl_side import both, join
from kvferry.cuda.device import device_uuid
from kvferry.cuda.memory import memory_info
from kvferry.errors import NcclError, NcclPeerError, SameDeviceError
from kvferry.p2p.nccl import NcclLauncher, NCCLLibrary, NcclSettings
from serving.process import Side, SideError, Zygote, eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 1 << 20
GIB = 1 << 30
_NUM_GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(_NUM_GPUS < 2, reason=f"needs 2 GPUs, sees {_NUM_GPUS}")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


class Stage:
    """Starts sides, and ends those that are left."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._sides: list[Side] = []

    def start(self, device: int, **env: str) -> Side:
        side = self._zygote.start("nccl", device=device, env=env)
        self._sides.append(side)
        return side

    def pair(self, **env: str) -> tuple[Side, Side]:
        sides = self.start(0, **env), self.start(1, **env)
        join(*sides)
        return sides

    def close(self) -> None:
        for side in self._sides:
            side.close()
        for side in self._sides:
            eventually(lambda side=side: not side.alive, 40)  # type: ignore[misc]


@pytest.fixture
def stage(zygote: Zygote) -> Iterator[Stage]:
    made = Stage(zygote)
    yield made
    made.close()


def check_moves(sender: Side, receiver: Side, nbytes: int = 64 * MIB) -> None:
    for side in (sender, receiver):
        side.call("alloc", name="check", nbytes=nbytes)
    sender.call("fill", name="check", seed=9)
    receiver.call("fill", name="check", value=0)
    whole = [["check", 0, nbytes]]
    both(sender, receiver, "exchange", {"sends": whole}, {"receives": whole})
    assert receiver.call("digest", name="check") == sender.call("digest", name="check")


# ---- On one GPU.


def test_the_library_of_torchs_wheel_is_found() -> None:
    library = NCCLLibrary()
    assert library.version >= 21800
    assert torch.cuda.nccl.version()[:2] == (library.version // 10000, library.version // 100 % 100)  # type: ignore[no-untyped-call]


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    library = NCCLLibrary()
    with NcclLauncher(library, 0) as launcher:
        began = time.monotonic()
        with pytest.raises(SameDeviceError, match=device_uuid(0)):
            launcher.connect(bytes(library.ncclGetUniqueId()), 0, peer_device_uuid=device_uuid(0), name="itself")
        assert time.monotonic() - began < 5


def test_a_peer_that_never_joins_is_an_error_in_time_and_leaves_nothing() -> None:
    library = NCCLLibrary()
    torch.zeros(1, device="cuda:0")
    with NcclLauncher(library, 0) as launcher:

        def fail() -> None:
            connecting = launcher.connect(
                bytes(library.ncclGetUniqueId()), 0, peer_device_uuid="GPU-of-nobody", name="nobody", timeout_s=3
            )
            with pytest.raises(NcclPeerError, match="not connected"):
                connecting.result(30)

        fail()  # the first loads NCCL's kernels
        free, _ = memory_info(0)
        began = time.monotonic()
        fail()
        assert time.monotonic() - began < 3 + 5
        assert free - memory_info(0)[0] <= 32 * MIB
        assert launcher.num_communicators == launcher.num_stuck == 0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-nccl")]


def test_a_communicator_that_does_not_fit_is_refused() -> None:
    library = NCCLLibrary()
    with NcclLauncher(library, 0) as launcher:
        torch.cuda.empty_cache()
        hog = torch.empty(memory_info(0)[0] - 100 * MIB, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(NcclError, match="takes up to 132 MiB of GPU memory"):
            launcher.connect(bytes(library.ncclGetUniqueId()), 0, peer_device_uuid="GPU-other", name="other")
        del hog
    torch.cuda.empty_cache()


# ---- On two.


@two_gpus
def test_a_gibibyte_each_way(stage: Stage) -> None:
    sides = stage.pair()
    for seed, side in enumerate(sides):
        side.call("alloc", name="out", nbytes=GIB, seed=seed)
        side.call("alloc", name="in", nbytes=GIB)
    ranges = {"sends": [["out", 0, GIB]], "receives": [["in", 0, GIB]]}
    both(*sides, "exchange", ranges, ranges)
    for side, other in (sides, sides[::-1]):
        assert side.call("digest", name="in") == other.call("digest", name="out")


@two_gpus
def test_a_thousand_random_sizes(stage: Stage) -> None:
    first, second = stage.pair()
    first.call("alloc", name="m", nbytes=32 * MIB, seed=1)
    second.call("alloc", name="m", nbytes=32 * MIB)
    same = {"name": "m", "count": 1000, "seed": 3}
    ours, theirs = both(first, second, "random_sizes", {**same, "send": True}, {**same, "send": False})
    assert ours == theirs


@two_gpus
@pytest.mark.parametrize("connections", ["1", "8"])
def test_both_ways_at_once_beside_a_busy_gpu(stage: Stage, connections: str) -> None:
    sides = stage.pair(CUDA_DEVICE_MAX_CONNECTIONS=connections)
    for seed, side in enumerate(sides):
        side.call("alloc", name="out", nbytes=256 * MIB, seed=seed)
        side.call("alloc", name="in", nbytes=256 * MIB)
        side.call("compute", count=500)
    ranges = {"count": 100, "sends": [["out", 0, 256 * MIB]], "receives": [["in", 0, 256 * MIB]]}
    both(*sides, "exchange", ranges, ranges)
    for side, other in (sides, sides[::-1]):
        assert side.call("digest", name="in") == other.call("digest", name="out")


@two_gpus
def test_a_communicator_takes_no_more_memory_than_is_published(stage: Stage) -> None:
    """The second: the first loads NCCL's kernels too, once a process."""
    first, second = stage.pair()
    before = first.call("held")["gpu_bytes"]
    join(first, second)
    check_moves(first, second, nbytes=MIB)
    taken = first.call("held")["gpu_bytes"] - before - 2 * MIB
    assert taken <= NcclSettings().bytes_per_peer + 16 * MIB


@two_gpus
def test_registered_memory(stage: Stage) -> None:
    first, second = stage.pair()
    handles = [side.call("alloc_registered", name="r", nbytes=64 * MIB)["handle"] for side in (first, second)]
    first.call("fill", name="r", seed=4)
    whole = [["r", 0, 64 * MIB]]
    for _ in range(3):
        second.call("fill", name="r", value=0)
        both(first, second, "exchange", {"sends": whole}, {"receives": whole})
        assert second.call("digest", name="r") == first.call("digest", name="r")
    for side, handle in zip((first, second), handles, strict=True):
        side.call("unregister", handle=handle)
    check_moves(first, second)


@two_gpus
@pytest.mark.parametrize("victim_sends", [False, True], ids=["receiver", "sender"])
@pytest.mark.parametrize("flowing", [False, True], ids=["waiting", "flowing"])
def test_the_peer_is_killed_in_mid_transfer(stage: Stage, victim_sends: bool, flowing: bool) -> None:
    """An abort ends it in time, the stream works, another peer is served, and memory does not grow."""
    survivor = stage.start(0)
    survivor.call("alloc", name="m", nbytes=GIB, seed=1)
    held = []
    for _ in range(3):
        victim = stage.start(1)
        victim.call("alloc", name="m", nbytes=GIB)
        join(survivor, victim)
        sender, receiver = (victim, survivor) if victim_sends else (survivor, victim)
        whole, count = [["m", 0, GIB]], 3000  # 12 s of traffic
        if flowing or victim is not sender:
            sender.call("begin", sends=whole, count=count)
        if flowing or victim is not receiver:
            receiver.call("begin", receives=whole, count=count)
        time.sleep(0.2)  # a transfer takes 4 ms: wherever this one is
        victim.kill()
        eventually(lambda victim=victim: not victim.alive, 20)  # type: ignore[misc]
        assert survivor.call("abort", reason="engine 7 was killed")["seconds"] < 5
        assert survivor.call("running") == {"done": True, "error": "NcclPeerError"}
        assert survivor.call("stream_works")["works"]
        again = stage.start(1)
        join(survivor, again)
        check_moves(survivor, again)
        survivor.call("close_communicator")
        again.end(40)
        held.append(survivor.call("held")["gpu_bytes"])
    assert held[-1] - held[0] <= 64 * MIB


@two_gpus
def test_the_peer_dies_after_it_took_the_id(stage: Stage) -> None:
    first, victim = stage.start(0), stage.start(1)
    unique_id, uuid = first.call("unique_id")["unique_id"], victim.call("uuid")["uuid"]
    victim.kill()
    began = time.monotonic()
    with pytest.raises(SideError, match="not connected"):
        first.call("connect", unique_id=unique_id, rank=0, peer_uuid=uuid, within_s=2)
    assert time.monotonic() - began < 10
    second = stage.start(1)
    join(first, second)
    check_moves(first, second)


@two_gpus
def test_a_process_whose_transfer_hangs_ends_on_sigterm(stage: Stage) -> None:
    first, second = stage.pair()
    first.call("alloc", name="m", nbytes=MIB, seed=1)
    first.call("begin", sends=[["m", 0, MIB]])
    second.kill()
    os.kill(first.pid, signal.SIGTERM)
    eventually(lambda: not first.alive, 10)


@two_gpus
def test_a_launcher_closes_though_its_peer_is_gone(stage: Stage) -> None:
    first, second = stage.pair()
    first.call("alloc", name="m", nbytes=MIB, seed=1)
    first.call("begin", sends=[["m", 0, MIB]])
    second.kill()
    began = time.monotonic()
    first.end(20)
    assert time.monotonic() - began < 15
