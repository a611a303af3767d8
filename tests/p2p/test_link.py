"""The frames of the host carrier, over a pair of sockets."""

from __future__ import annotations

import random
import select
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import ProtocolError
from kvferry.p2p.carriers.link import FRAME_BYTES, Link
from kvferry.p2p.carriers.runs import ByteRuns


class Ends:
    """Two links that are connected, and what has landed."""

    def __init__(self) -> None:
        self.landed: list[tuple[int, int]] = []
        self.late: list[tuple[int, int, ByteRuns]] = []  # places of which the thread hears only when it catches up
        one, two = socket.socketpair()
        for sock in (one, two):
            sock.setblocking(False)
        self.sender = Link(one, lambda *_: None, lambda: None)
        self.receiver = Link(two, lambda *item: self.landed.append(item), self.catch_up)

    def catch_up(self) -> None:
        while self.late:
            self.receiver.expect(*self.late.pop())

    def run(self, rounds: int = 100_000) -> None:
        """Until nothing is to be sent and all has been read."""
        for _ in range(rounds):
            if self.sender.wants_to_send:
                self.sender.flush()
            if select.select([self.receiver.socket], [], [], 0)[0]:
                assert self.receiver.read()
            elif not self.sender.wants_to_send:
                return


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.sender.socket.close()
    made.receiver.socket.close()


def memory(nbytes: int, seed: int | None = None) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ByteRuns]:
    made = (
        np.zeros(nbytes, dtype=np.uint8)
        if seed is None
        else np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    )
    return made, ByteRuns.single(made.ctypes.data, nbytes, made)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, FRAME_BYTES, 4 * FRAME_BYTES, 9 * FRAME_BYTES + 3])
def test_one_item(ends: Ends, nbytes: int) -> None:
    """Also where a turn ends with a frame."""
    source, reading = memory(nbytes, 1)
    target, writing = memory(nbytes)
    ends.receiver.expect(7, 0, writing)
    ends.sender.send(7, 0, reading)
    ends.run()
    assert ends.landed == [(7, 0)]
    assert np.array_equal(source, target)


def test_small_items_are_not_held_up_by_big_ones(ends: Ends) -> None:
    big, small = memory(8 * FRAME_BYTES, 1), memory(1000, 2)
    into = memory(8 * FRAME_BYTES), memory(1000)
    ends.receiver.expect(1, 0, into[0][1])
    ends.receiver.expect(2, 0, into[1][1])
    ends.sender.send(1, 0, big[1])
    ends.sender.send(2, 0, small[1])
    ends.run()
    assert ends.landed == [(2, 0), (1, 0)]
    assert np.array_equal(big[0], into[0][0])
    assert np.array_equal(small[0], into[1][0])


def test_a_place_that_is_queued_behind_the_first_bytes(ends: Ends) -> None:
    source, reading = memory(5000, 1)
    target, writing = memory(5000)
    ends.late.append((1, 0, writing))
    ends.sender.send(1, 0, reading)
    ends.run()
    assert ends.landed == [(1, 0)]
    assert np.array_equal(source, target)


@pytest.mark.parametrize("seed", range(12))
def test_stopped_at_any_byte(ends: Ends, seed: int) -> None:
    """Neither side touches its memory any more, and what is sent next arrives."""
    dice = random.Random(seed)
    source, reading = memory(5 * FRAME_BYTES, 1)
    target, writing = memory(5 * FRAME_BYTES)
    after = memory(FRAME_BYTES + 5, 3), memory(FRAME_BYTES + 5)
    ends.receiver.expect(1, 0, writing)
    ends.receiver.expect(2, 0, after[1][1])
    ends.sender.send(1, 0, reading)
    ends.run(rounds=dice.randrange(1, 40))
    stop = dice.choice(["sender", "receiver", "both"])
    if stop != "receiver":
        ends.sender.stop_sending(1)
        source[:] = 0  # it is used for something else now
    if stop != "sender":
        ends.receiver.stop_landing(1)
        target[:] = 7
    ends.sender.send(2, 0, after[0][1])
    ends.run()
    assert (2, 0) in ends.landed
    assert np.array_equal(after[0][0], after[1][0])
    if stop != "sender":
        assert (target == 7).all()
    elif (1, 0) not in ends.landed:
        sent = np.random.default_rng(1).integers(0, 256, 5 * FRAME_BYTES, dtype=np.uint8)
        wrong = np.flatnonzero(target != sent)
        assert (target[wrong] == 0).all()  # what has arrived is what it was when it was sent
        assert wrong[0] % FRAME_BYTES == 0


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<IQIQI", 0x12345678, 1, 0, 0, 10),
        struct.pack("<IQIQI", 0x4B564632, 1, 0, 0, FRAME_BYTES + 1),
        struct.pack("<IQIQI", 0x4B564632, 1, 0, 5, 10),
        struct.pack("<IQIQI", 0x4B564632, 1, 0, 0, 101),
        struct.pack("<IQIQI", 0x4B564632, 1, 0, 0, 0),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_frame(ends: Ends, header: bytes) -> None:
    target, writing = memory(100)
    ends.receiver.expect(1, 0, writing)
    ends.sender.socket.send(header)
    with pytest.raises(ProtocolError):
        ends.run()
    assert not target.any()


def test_frames_that_nobody_waits_for(ends: Ends) -> None:
    """As after a transfer was stopped: they are read and dropped."""
    ends.sender.send(1, 0, memory(3 * FRAME_BYTES, 1)[1])
    ends.run()
    assert ends.landed == []


def test_the_end(ends: Ends) -> None:
    ends.sender.socket.close()
    assert not ends.receiver.read()
