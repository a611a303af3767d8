"""Communicators over the double, both ranks in this process: what goes well, and in which order."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cuda.device import device_uuid
from kvferry.errors import NcclError, NcclPeerError, SameDeviceError
from kvferry.p2p.nccl import NcclSettings, State
from nccl_ranks import WAIT_S, Memory, Ranks, check_moves, ranks

MIB = 1 << 20


@pytest.fixture
def two(nccl_so: Path) -> Iterator[Ranks]:
    with ranks(nccl_so) as made:
        yield made


def test_bytes_arrive(two: Ranks) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, 3 * MIB + 1, random=True), Memory(1, 3 * MIB + 1)
    received = receiver.exchange(receives=[target.range], timeout_s=10)
    sent = sender.exchange(sends=[source.range], timeout_s=10)
    assert received.result(WAIT_S) is None
    assert sent.result(WAIT_S) is None
    assert target.read() == source.read()


def test_connecting_has_moved_bytes_both_ways_and_taken_the_channels_that_were_asked_for(nccl_so: Path) -> None:
    with ranks(nccl_so, settings=NcclSettings(max_ctas=4)) as made:
        sender, _ = made.pair()
        assert sender.state is State.READY
        assert made.double.library.nccl_double_max_ctas(ctypes.c_void_p(sender._handle)) == 4


def test_many_ranges_go_in_one_launch_in_their_order(two: Ranks) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, MIB, random=True), Memory(1, MIB)
    sizes = [random.Random(5).randrange(1, 20000) for _ in range(60)]
    starts = [sum(sizes[:index]) % (MIB - 20000) for index in range(60)]
    sends = [(source.address + at, nbytes) for at, nbytes in zip(starts, sizes, strict=True)]
    receives = [(target.address + at, nbytes) for at, nbytes in zip(starts, sizes, strict=True)]
    waits = [sender.exchange(sends=sends, timeout_s=10), receiver.exchange(receives=receives, timeout_s=10)]
    for wait in waits:
        wait.result(WAIT_S)
    found, expected = target.read(), source.read()
    assert all(found[at : at + nbytes] == expected[at : at + nbytes] for at, nbytes in zip(starts, sizes, strict=True))


def test_exchanges_of_one_communicator_keep_their_order(two: Ranks) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, 64 << 10), Memory(1, 64 << 10)
    ended: list[int] = []
    pieces = [(at, 1 << 10) for at in range(0, 64 << 10, 1 << 10)]
    source.write(bytes(at >> 10 for at, _ in pieces for _ in range(1 << 10)))
    waits = []
    for number, (at, nbytes) in enumerate(pieces):
        received = receiver.exchange(receives=[(target.address + at, nbytes)], timeout_s=20)
        received.add_done_callback(partial(lambda number, _: ended.append(number), number))
        waits.append(received)
        waits.append(sender.exchange(sends=[(source.address + at, nbytes)], timeout_s=20))
    for wait in waits:
        wait.result(WAIT_S)
    assert ended == list(range(64))
    assert target.read() == source.read()


def test_an_exchange_is_not_done_before_its_launch_is_carried_out(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event recorded while NCCL says "in progress" is reached at once: nothing is in the stream yet."""
    sender, receiver = two.pair()
    monkeypatch.setenv("NCCL_DOUBLE_LATE_US", "30000")
    source, target = Memory(0, MIB), Memory(1, MIB)
    for _ in range(5):
        source.write(random.Random(7).randbytes(MIB))
        target.write(bytes(MIB))
        received = receiver.exchange(receives=[target.range], timeout_s=10)
        sent = sender.exchange(sends=[source.range], timeout_s=10)
        received.result(WAIT_S)
        assert target.read() == source.read()
        sent.result(WAIT_S)


def test_events_are_told_in_their_order(two: Ranks) -> None:
    """Also those that the GPU reaches in the midst of asking: parts are exchanged in the order of their copies."""
    questions = itertools.count()
    told: list[int] = []
    told_all = threading.Event()

    class Reached:
        def query(self) -> bool:
            return next(questions) > 0  # all are, right after the first question

    def tell(number: int, error: Exception | None) -> None:
        told.append(number)
        if error is not None or len(told) == 3:
            told_all.set()

    def watch() -> None:
        for number in range(3):
            event: Any = Reached()
            two.launchers[0].watch(event, partial(tell, number))

    sender, _ = two.pair()
    sender.call(watch)
    assert told_all.wait(WAIT_S)
    assert told == [0, 1, 2]


def test_both_ways_at_once_over_one_communicator(two: Ranks) -> None:
    first, second = two.pair()
    mine, theirs = Memory(0, 2 * MIB, random=True), Memory(1, 2 * MIB, random=True)
    got, gotten = Memory(0, 2 * MIB), Memory(1, 2 * MIB)
    for _ in range(20):
        waits = [
            first.exchange(sends=[mine.range], receives=[got.range], timeout_s=10),
            second.exchange(sends=[theirs.range], receives=[gotten.range], timeout_s=10),
        ]
        for wait in waits:
            wait.result(WAIT_S)
    assert (got.read(), gotten.read()) == (theirs.read(), mine.read())


def test_both_ways_at_once_over_a_communicator_each_a_hundred_times(two: Ranks) -> None:
    there, back = two.pair(0, 1), two.pair(1, 0)
    mine, theirs = Memory(0, MIB, random=True), Memory(1, MIB, random=True)
    got, gotten = Memory(0, MIB), Memory(1, MIB)
    for number in range(100):
        waits = [
            there[0].exchange(sends=[mine.range], timeout_s=10),
            back[0].exchange(sends=[theirs.range], timeout_s=10),
            back[1].exchange(receives=[got.range], timeout_s=10),
            there[1].exchange(receives=[gotten.range], timeout_s=10),
        ]
        for wait in waits:
            wait.result(WAIT_S)
        if number % 25 == 0:
            assert (got.read(), gotten.read()) == (theirs.read(), mine.read())
            got.write(bytes(MIB))
            mine.write(os.urandom(MIB))
    assert got.read() == theirs.read()


@pytest.mark.parametrize("connections", ["1", "8"])
def test_three_in_a_ring_all_sending(nccl_so: Path, connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One communicator a direction; every launch is agreed on by its two sides only, and all finish."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with ranks(nccl_so, 3) as made:
        sides = [made.pair(device, (device + 1) % 3) for device in range(3)]
        sources = [Memory(device, MIB, random=True) for device in range(3)]
        targets = [Memory(device, MIB) for device in range(3)]
        waits = []
        for _ in range(30):
            for device, (sender, receiver) in enumerate(sides):
                waits.append(sender.exchange(sends=[sources[device].range], timeout_s=30))
                waits.append(receiver.exchange(receives=[targets[(device + 1) % 3].range], timeout_s=30))
        for wait in waits:
            wait.result(WAIT_S)
        assert [target.read() for target in targets] == [sources[2].read(), sources[0].read(), sources[1].read()]


def test_two_ranks_on_one_gpu_are_refused_before_anything_is_made(two: Ranks) -> None:
    with pytest.raises(SameDeviceError, match=device_uuid(0)):
        two.begin(0, two.unique_id(), at=0, peer=0)
    assert two.launchers[0].num_communicators == 0


def test_one_communicator_too_many_is_refused_and_the_others_go_on(nccl_so: Path) -> None:
    with ranks(nccl_so, settings=NcclSettings(max_communicators=2)) as made:
        pairs = [made.pair(), made.pair()]
        with pytest.raises(NcclError, match="has 2 communicators already"):
            made.begin(0, made.unique_id(), at=0, peer=1)
        for wait in [side.close() for side in pairs[0]]:
            wait.result(WAIT_S)
        made.pair()
        check_moves(*pairs[1])


def test_with_too_little_gpu_memory_only_the_new_peer_is_refused(two: Ranks) -> None:
    sides = two.pair()
    hog = Memory(0, (64 << 30) - (130 << 20))  # sparse: nobody writes to it
    with pytest.raises(NcclError, match="takes up to 132 MiB of GPU memory"):
        two.begin(0, two.unique_id(), at=0, peer=1)
    assert hog.nbytes
    assert two.launchers[0].num_communicators == 1
    check_moves(*sides)


def test_registered_memory(two: Ranks) -> None:
    sides = two.pair()
    address = two.library.ncclMemAlloc(MIB)
    handle = sides[0].register(address, MIB).result(WAIT_S)
    assert two.double.num_registered == 1
    sides[0].unregister(handle).result(WAIT_S)
    assert two.double.num_registered == 0
    with pytest.raises(NcclError, match="not registered"):
        sides[0].unregister(handle).result(WAIT_S)
    check_moves(*sides)  # a registration that fails breaks nothing
    sides[0].register(address, MIB).result(WAIT_S)
    sides[0].close().result(WAIT_S)
    assert two.double.num_registered == 0
    two.library.ncclMemFree(address)
    with pytest.raises(NcclPeerError, match="ended"):
        sides[0].register(address, MIB).result(WAIT_S)


def test_what_is_no_exchange_is_refused_at_once(two: Ranks) -> None:
    sender, receiver = two.pair()
    for sends in ([], [(0, 5)], [(4096, 0)], [(4096, -1)]):
        with pytest.raises(ValueError, match="at least one"):
            sender.exchange(sends=sends, timeout_s=1)
    with pytest.raises(ValueError, match="at least one"):
        sender.exchange(sends=[(1 << 64, 5)], timeout_s=1)
    with pytest.raises(ValueError, match="rank is 0 or 1"):
        two.begin(2, two.unique_id(), at=0, peer=1)
    with pytest.raises(ValueError, match="128 bytes"):
        two.begin(0, b"short", at=0, peer=1)
    check_moves(sender, receiver)


def test_numbers_of_numpy_are_taken(two: Ranks) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, 1000, random=True), Memory(1, 1000)
    sent = sender.exchange(sends=np.array([source.range]), timeout_s=10)  # type: ignore[arg-type]
    receiver.exchange(receives=[(np.int64(target.address), np.int64(1000))], timeout_s=10).result(WAIT_S)
    sent.result(WAIT_S)
    assert target.read() == source.read()


def test_closing_does_what_it_has_first(two: Ranks) -> None:
    sender, receiver = two.pair()
    source, target = Memory(0, 4 * MIB, random=True), Memory(1, 4 * MIB)
    sent = sender.exchange(sends=[source.range], timeout_s=10)
    ended = sender.close()
    with pytest.raises(NcclPeerError, match="it is closing"):
        sender.exchange(sends=[source.range], timeout_s=10).result(WAIT_S)
    assert not sent.done()
    receiver.exchange(receives=[target.range], timeout_s=10).result(WAIT_S)
    assert ended.result(WAIT_S) is None
    assert sent.done()
    assert sent.exception() is None
    assert sender.state is State.ENDED
    assert sender.close().result(WAIT_S) is None
    assert target.read() == source.read()


def test_a_launcher_closes_what_is_open_and_takes_nothing_after(nccl_so: Path) -> None:
    with ranks(nccl_so) as made:
        sender, _ = made.pair()
        launcher = made.launchers[0]
        launcher.close()
        launcher.close()
        assert sender.state is State.ENDED
        assert made.double.num_communicators == 1
        with pytest.raises(NcclError, match="is closed"):
            made.begin(0, made.unique_id(), at=0, peer=1)
        with pytest.raises(NcclError, match="is closed"):
            sender.exchange(sends=[(4096, 1)], timeout_s=1)
        assert sender.close().result(0) is None
        assert sender.abort("too late").result(0) is None
        made.launchers[1].close()
        assert made.double.num_communicators == 0
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-nccl")]
    gc.collect()  # a stream or event that is left would warn here, and warnings are errors


def test_nothing_is_left_on_the_gpu(nccl_so: Path) -> None:
    with ranks(nccl_so) as made:
        for _ in range(3):
            sides = made.pair()
            check_moves(*sides)
        for launcher in made.launchers:
            launcher.close()
        mine = [allocation for allocation in made.driver.fake.allocations.values() if allocation.size != 1024]
        assert not mine, "the launchers' own memory is not given back"
        assert not made.driver.fake._streams
        assert not made.driver.fake._events
