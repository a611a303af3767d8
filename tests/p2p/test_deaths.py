"""Engines that are killed, stopped and restarted, with transfers on their way; what is of the host carrier alone."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from p2p.sides import BIG, BLOCKS, FEW, Sides, address_of, begin, check_carrier, send_and_check
from serving.process import Side, eventually, freeze

BACK_S = 10.0  # 0.5 s are promised; this machine may be busy with other things


def start(sides: Sides, carrier: str, seed: int, **config: Any) -> Side:
    """An engine whose memory has it come to use this carrier."""
    return sides.start(caches={**BIG, "seed": seed, "shared": carrier == "ipc"}, **config)


@pytest.mark.timeout(180)
def test_receivers_killed_in_mid_transfer(sides: Sides, carrier: str) -> None:
    """N6: the sender has an error at once, another receiver is served, and nothing piles up or stays mapped."""
    sender, bystander = start(sides, carrier, 1), start(sides, carrier, 2)
    send_and_check(sender, bystander, "first")
    mapped, fds = sender.memfd_inodes(), sender.fds()
    dice = random.Random(5)
    usage = None
    for turn in range(10):
        victim = start(sides, carrier, 3)
        begin(sender, victim, f"t{turn}")
        time.sleep(dice.random() * 0.02)
        victim.kill()
        sender.answer()
        assert sender.call("wait", what=f"send t{turn}", within_s=10)["code"] in ("peer_gone", None)
        eventually(lambda: sender.memfd_inodes() == mapped, BACK_S)
        send_and_check(sender, bystander, f"s{turn}")
        if turn == 1:
            usage = sender.call("usage")
    check_carrier(sender, carrier)
    assert usage is not None
    after = sender.call("usage")
    assert after["threads"] == usage["threads"]
    assert after["rss"] < usage["rss"] + (64 << 20)
    eventually(lambda: sender.fds() == fds)
    assert sender.call("stats")["stats"]["sending"] == 0


@pytest.mark.timeout(180)
def test_senders_killed_in_mid_transfer(sides: Sides, carrier: str) -> None:
    """The receiver's claim fails at once, nothing writes into its blocks any more, and other senders go on."""
    receiver, bystander = start(sides, carrier, 1), start(sides, carrier, 2)
    send_and_check(bystander, receiver, "first")
    mapped, fds = receiver.memfd_inodes(), receiver.fds()
    dice = random.Random(6)
    for turn in range(10):
        victim = start(sides, carrier, 3)
        begin(victim, receiver, f"t{turn}")
        time.sleep(dice.random() * 0.02)
        victim.kill()
        assert receiver.call("wait", what=f"receive t{turn}", within_s=10)["code"] in ("peer_gone", None)
        eventually(lambda: receiver.memfd_inodes() == mapped, BACK_S)
        digest = receiver.call("digest", blocks=BLOCKS)
        send_and_check(bystander, receiver, f"s{turn}")
        assert receiver.call("digest", blocks=BLOCKS) == digest
    check_carrier(receiver, carrier)
    eventually(lambda: receiver.fds() == fds)
    stats = receiver.call("stats")["stats"]
    assert (stats["receiving"], stats["used_bytes"]) == (0, {"buffer": 0})


def test_restarted_on_the_same_port(sides: Sides, carrier: str) -> None:
    """N7: the next transfer goes to the new engine, and to its memory, with the sender untouched."""
    sender, receiver = start(sides, carrier, 1), start(sides, carrier, 2)
    address = address_of(receiver)
    for turn in range(3):
        send_and_check(sender, receiver, f"before {turn}")
        receiver.kill()
        eventually(lambda receiver=receiver: not receiver.alive)  # type: ignore[misc]
        receiver = start(sides, carrier, 3 + turn, address=address)
        send_and_check(sender, receiver, f"after {turn}")
        check_carrier(sender, carrier)
    assert list(sender.call("stats")["stats"]["peers"]) == [address]


def test_a_receiver_that_stops_while_its_lease_runs_out(sides: Sides) -> None:
    """The sender pushes, so it stops by itself; when the receiver goes on it finds nothing of it."""
    sender = sides.start(caches={**BIG, "seed": 1}, lease_s=4.0, heartbeat_s=20)
    receiver = sides.start(caches={**BIG, "seed": 2}, heartbeat_s=20)
    begin(sender, receiver, "t")
    freeze(receiver.pid)
    sender.answer()
    code = sender.call("wait", what="send t", within_s=20)["code"]
    assert code in ("expired", None)
    os.kill(receiver.pid, signal.SIGCONT)
    assert receiver.call("wait", what="receive t", within_s=20)["code"] == code
    send_and_check(sender, receiver, "next")


def test_a_peer_that_stops_for_good(sides: Sides) -> None:
    """Silence for three heartbeats ends its session, on whichever side it is; others are unharmed."""
    middle = sides.start(caches={**BIG, "seed": 1}, heartbeat_s=0.5)
    stopped = sides.start(caches={**BIG, "seed": 2}, heartbeat_s=0.5)
    bystander = sides.start(caches={**BIG, "seed": 3}, heartbeat_s=0.5)
    begin(middle, stopped, "out")
    middle.answer()
    begin(stopped, middle, "in")
    stopped.answer()
    freeze(stopped.pid)
    assert middle.call("wait", what="send out", within_s=20)["code"] in ("peer_gone", None)
    assert middle.call("wait", what="receive in", within_s=20)["code"] in ("peer_gone", None)
    send_and_check(middle, bystander, "next")
    eventually(lambda: len(middle.call("stats")["stats"]["peers"]) == 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_would_send_by_itself_is_gone_before_it_does(sides: Sides, how: signal.Signals) -> None:
    """Nothing of it was asked for, nor has come: the receiver knows its address, and waits no longer for it."""
    sender, receiver = (sides.start(heartbeat_s=0.5) for _ in range(2))
    receiver.call("receive", name="t", blocks=FEW, senders=[address_of(sender)], within_s=300)
    eventually(lambda: len(receiver.call("stats")["stats"]["peers"]) == 1)
    os.kill(sender.pid, how)
    assert receiver.call("wait", what="receive t", within_s=20)["code"] == "peer_gone"


def test_paused_for_two_seconds(sides: Sides) -> None:
    """N10: the sender learns that it may use its blocks again only once they have been read; the bytes are right."""
    sender = sides.start(caches={**BIG, "seed": 1})
    receiver = sides.start(caches={**BIG, "seed": 2})
    send_and_check(sender, receiver, "first")
    freeze(receiver.pid)
    sender.call("send", name="t", blocks=BLOCKS, to=address_of_stopped(sender))
    time.sleep(2)
    assert not sender.call("done", what="send t")["done"]
    os.kill(receiver.pid, signal.SIGCONT)
    receiver.call("receive", name="t", blocks=BLOCKS, within_s=30)
    assert sender.call("wait", what="send t") == {"code": None}
    assert receiver.call("wait", what="receive t") == {"code": None}
    assert receiver.call("digest", blocks=BLOCKS) == sender.call("digest", blocks=BLOCKS)


def address_of_stopped(peer: Side) -> str:
    """The address of the only engine that another one is connected to."""
    (address,) = peer.call("stats")["stats"]["peers"]
    return str(address)


def test_nobody_is_there(sides: Sides) -> None:
    """An address at which nobody listens is an error within the time for setting up."""
    sender = sides.start(connect_timeout_s=1.0)
    gone = sides.start()
    address = address_of(gone)
    gone.kill()
    started = time.monotonic()
    sender.call("send", name="t", blocks=FEW, to=address)
    assert sender.call("wait", what="send t", within_s=20)["code"] == "unreachable"
    assert time.monotonic() - started < 10
    receiver = sides.start(address=address)
    send_and_check(sender, receiver, "next")


def test_a_claimant_whose_sender_is_killed_before_it_sends(sides: Sides) -> None:
    """N10: with an address to ask, the claim ends with the sender; without one, at its deadline."""
    sender, receiver = sides.start(), sides.start()
    receiver.call("receive", name="asked", blocks=[1, 2], source=address_of(sender), within_s=30)
    receiver.call("receive", name="waited", blocks=[3, 4], within_s=1.0)
    eventually(lambda: len(receiver.call("stats")["stats"]["peers"]) == 1)
    sender.kill()
    assert receiver.call("wait", what="receive asked", within_s=10)["code"] == "peer_gone"
    assert receiver.call("wait", what="receive waited", within_s=10)["code"] == "timed_out"


def test_killed_with_a_forked_child(sides: Sides) -> None:
    """The child has copies of the descriptors, and lives; the death is noticed at once all the same."""
    sender = sides.start(heartbeat_s=60)
    receiver = sides.start(heartbeat_s=60)
    receiver.call("receive", name="t", blocks=FEW, source=address_of(sender), within_s=50)
    eventually(lambda: len(receiver.call("stats")["stats"]["peers"]) == 1)
    child = sender.call("fork")["pid"]
    try:
        sender.kill()
        assert receiver.call("wait", what="receive t", within_s=20)["code"] == "peer_gone"
    finally:
        os.kill(child, signal.SIGKILL)
