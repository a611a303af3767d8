"""Communicators over the double, both ranks in this process: what fails, in bounded time, and what is left of it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda.device import bound
from kvferry.errors import NcclError, NcclPeerError, NcclStuckError
from kvferry.p2p.nccl import NcclSettings, State
from nccl_ranks import WAIT_S, Memory, Ranks, check_moves, ranks
from serving.process import eventually

MIB = 1 << 20


@pytest.fixture
def two(nccl_so: Path) -> Iterator[Ranks]:
    with ranks(nccl_so) as made:
        yield made


def nccl_threads() -> int:
    return sum(thread.name.startswith("kvferry-nccl-end") for thread in threading.enumerate())


def test_a_peer_that_never_joins_is_an_error_in_time_and_leaves_nothing(two: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(NcclPeerError, match=r"peer 1 \(rank 0 on device 0\): not connected: .* deadline"):
        two.begin(0, two.unique_id(), at=0, peer=1, timeout_s=0.3).result(WAIT_S)
    assert time.monotonic() - began < 5
    assert (two.launchers[0].num_communicators, two.double.num_communicators) == (0, 0)
    eventually(lambda: nccl_threads() == 0)
    check_moves(*two.pair())


def test_a_peer_that_never_joins_holds_up_no_other(two: Ranks) -> None:
    lost = two.begin(0, two.unique_id(), at=0, peer=1, timeout_s=8)
    for _ in range(3):
        sides = two.pair()
        check_moves(*sides)
    assert not lost.done()
    two.launchers[0].close()
    with pytest.raises(NcclPeerError, match="closed before it was connected"):
        lost.result(WAIT_S)


@pytest.mark.parametrize(
    ("plan", "call"),
    [
        ("ncclCommInitRankConfig:2", "ncclCommInitRankConfig"),
        ("asynchronous:6", "ncclCommGetAsyncError"),
        ("ncclSend:3", "ncclSend"),
        ("ncclGroupEnd:1", "ncclGroupEnd"),
    ],
)
def test_a_call_that_fails_while_connecting(two: Ranks, plan: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", plan)
    unique_id = two.unique_id()
    waits = [two.begin(rank, unique_id, at=rank, peer=1 - rank, timeout_s=5) for rank in range(2)]
    for wait in waits:
        with pytest.raises(NcclPeerError, match=f"{call} failed: .*the double was told to fail") as seen:
            wait.result(WAIT_S)
        assert isinstance(seen.value.__cause__, NcclError)
    assert two.double.num_communicators == 0
    monkeypatch.delenv("NCCL_DOUBLE_FAIL")
    check_moves(*two.pair())


def test_a_small_shm_is_named_where_connecting_failed(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", "ncclCommInitRankConfig:2")
    small = os.statvfs("/proc")
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(NcclPeerError, match=r"/dev/shm has only 0 MiB free"):
        two.begin(0, two.unique_id(), at=0, peer=1, timeout_s=1).result(WAIT_S)


@pytest.mark.parametrize("both", [False, True], ids=["launched", "waiting too"])
def test_a_peer_that_does_not_take_part_is_an_error_by_the_deadline(two: Ranks, both: bool) -> None:
    sender, receiver = two.pair()
    source = Memory(0, 4 * MIB)
    waits = [sender.exchange(sends=[source.range], timeout_s=0.3) for _ in range(5 if both else 1)]
    for wait in waits:
        with pytest.raises(NcclPeerError, match=r"<Exchange 4194304 bytes out, 0 bytes in> was not done") as seen:
            wait.result(WAIT_S)
        assert not isinstance(seen.value, NcclStuckError)
    assert sender.ended.result(WAIT_S) is None
    with pytest.raises(NcclPeerError, match="was not done by its deadline"):
        sender.exchange(sends=[source.range], timeout_s=1).result(WAIT_S)
    for wait in (sender.abort("again"), sender.close(), receiver.abort("told by signalling")):
        assert wait.result(WAIT_S) is None
    check_moves(*two.pair())


def test_an_abort_ends_what_is_under_way_and_only_then_is_it_reported(two: Ranks) -> None:
    sender, _ = two.pair()
    source = Memory(0, 4 * MIB)
    states = []
    sent = sender.exchange(sends=[source.range], timeout_s=60)
    sent.add_done_callback(lambda _: states.append((sender.state, two.double.num_communicators)))
    assert sender.abort("engine 7 was killed").result(WAIT_S) is None
    with pytest.raises(NcclPeerError, match="engine 7 was killed"):
        sent.result(WAIT_S)
    assert states == [(State.ENDED, 1)]
    eventually(lambda: nccl_threads() == 0)


@pytest.mark.parametrize(("mine", "theirs"), [(MIB, MIB + 1), (MIB + 1, MIB)])
def test_sizes_that_do_not_match_hang_until_the_deadline_on_both_sides(two: Ranks, mine: int, theirs: int) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, 2 * MIB), Memory(1, 2 * MIB)
    waits = [
        sender.exchange(sends=[(source.address, mine)], timeout_s=0.5),
        receiver.exchange(receives=[(target.address, theirs)], timeout_s=0.5),
    ]
    for wait in waits:
        with pytest.raises(NcclPeerError):
            wait.result(WAIT_S)


def test_a_launch_that_hangs_in_nccl_is_aborted_and_holds_up_nobody(
    nccl_so: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when NCCL connects to a peer that just died."""
    with ranks(nccl_so, 3) as made:
        hung, _ = made.pair(0, 2)
        good = made.pair(0, 1)
        monkeypatch.setenv("NCCL_DOUBLE_HANG", "launch")
        source = Memory(0, MIB)
        sent = hung.exchange(sends=[source.range], timeout_s=1.5)
        eventually(lambda: made.double.library.nccl_double_num_hung() == 1)
        monkeypatch.delenv("NCCL_DOUBLE_HANG")
        for _ in range(5):
            check_moves(*good)
        assert hung._lane.launching
        with pytest.raises(NcclPeerError, match="not done by its deadline"):
            sent.result(WAIT_S)


def test_an_abort_that_hangs_blocks_nobody_and_says_that_the_memory_is_not_safe(
    nccl_so: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(nccl_so, settings=NcclSettings(end_timeout_s=0.5, max_communicators=2)) as made:
        sender, receiver = made.pair()
        source = Memory(0, 4 * MIB)
        waits = [sender.exchange(sends=[source.range], timeout_s=30) for _ in range(2)]
        eventually(lambda: len(sender._lane._running) == 2)
        waits.append(sender.exchange(sends=[source.range], timeout_s=30))
        monkeypatch.setenv("NCCL_DOUBLE_HANG", "abort")
        with caplog.at_level(logging.ERROR), pytest.raises(NcclStuckError, match=r"NCCL did not return"):
            sender.abort("killed").result(WAIT_S)
        for wait in waits[:2]:
            with pytest.raises(NcclStuckError, match=r"killed; ending it took over 0\.5 s"):
                wait.result(WAIT_S)
        with pytest.raises(NcclPeerError, match="killed") as seen:
            waits[2].result(WAIT_S)
        assert not isinstance(seen.value, NcclStuckError)  # it was never launched
        check_moves(*made.pair())
        eventually(lambda: made.launchers[0].num_stuck == 1)
        with pytest.raises(NcclError, match="has 2 communicators already"):
            made.begin(0, made.unique_id(), at=0, peer=1)
        assert "not given back before the process ends" in caplog.text
        monkeypatch.delenv("NCCL_DOUBLE_HANG")
        eventually(lambda: nccl_threads() == 0)
        assert receiver.close().result(WAIT_S) is None


def test_an_abort_that_fails_is_told(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = two.pair()
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", "ncclCommAbort:1")
    with pytest.raises(NcclStuckError, match=r"killed; ending it failed: ncclCommAbort failed: unhandled cuda error"):
        sender.abort("killed").result(WAIT_S)


def test_a_close_does_not_wait_for_the_peer(nccl_so: Path) -> None:
    """As ncclCommDestroy would, until the peer has closed its side."""
    with ranks(nccl_so, settings=NcclSettings(end_timeout_s=0.5)) as made:
        sender, receiver = made.pair()
        assert sender.close().result(WAIT_S) is None
        assert (made.double.num_communicators, receiver.state) == (1, State.READY)


def test_a_launcher_closes_in_time_though_a_peer_does_not_take_part(nccl_so: Path) -> None:
    with ranks(nccl_so, settings=NcclSettings(end_timeout_s=0.3)) as made:
        sender, _ = made.pair()
        sent = sender.exchange(sends=[Memory(0, MIB).range], timeout_s=60)
        eventually(lambda: len(sender._lane._running) == 1)
        made.launchers[0].close()
        assert sender.state is State.ENDED
        with pytest.raises(NcclPeerError, match=r"it was closed, and what it had to do took over 0\.3 s"):
            sent.result(WAIT_S)


def test_a_driver_that_fails_fails_the_communicator_and_no_other(two: Ranks) -> None:
    broken, _ = two.pair()
    good = two.pair()
    source = Memory(0, MIB)
    two.driver.fake.failures["cuEventQuery"] = [700]
    with pytest.raises(NcclPeerError, match=r"cuEventQuery failed"):
        broken.exchange(sends=[source.range], timeout_s=30).result(WAIT_S)
    check_moves(*good)


def test_a_device_that_is_lost_ends_the_communicator_as_stuck(two: Ranks) -> None:
    sender, _ = two.pair()
    source = Memory(0, MIB)
    two.driver.fake.failures["cuEventQuery"] = [700]
    two.driver.fake.failures["cuStreamQuery"] = [700]
    with pytest.raises(NcclStuckError, match=r"cuEventQuery failed.*ending it failed: cuStreamQuery failed"):
        sender.exchange(sends=[source.range], timeout_s=30).result(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_ended_by_a_fault_of_ours(
    nccl_so: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(nccl_so) as made:
        sender, _ = made.pair()
        source = Memory(0, MIB)
        sent = sender.exchange(sends=[source.range], timeout_s=60)
        eventually(lambda: len(sender._lane._running) == 1)
        with monkeypatch.context() as patched:
            patched.setattr(type(sender), "step", lambda *_, **__: 1 / 0)
            with pytest.raises(NcclStuckError, match="the thread that makes its calls ended"):
                sent.result(WAIT_S)
            eventually(lambda: not made.launchers[0]._thread.is_alive())
        with pytest.raises(NcclError, match="is closed"):
            sender.exchange(sends=[source.range], timeout_s=60)
        assert made.launchers[0].num_stuck == 1
        made.double.library.ncclCommAbort(ctypes.c_void_p(sender._handle))


def test_no_descriptor_and_no_thread_is_left_by_failures(two: Ranks) -> None:
    def fail() -> None:
        sender, receiver = two.pair()
        source = Memory(0, MIB)
        sent = sender.exchange(sends=[source.range], timeout_s=30)
        for wait in (sender.abort("killed"), receiver.abort("killed")):
            wait.result(WAIT_S)
        assert sent.exception(WAIT_S) is not None
        with bound(0) as drv:
            drv.mem_free(source.address)

    fail()
    eventually(lambda: nccl_threads() == 0)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        fail()
    eventually(lambda: nccl_threads() == 0)
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 1
