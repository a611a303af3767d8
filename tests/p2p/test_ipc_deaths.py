"""Engines that map each other's KV caches, killed, stopped and restarted with copies on their way."""

from __future__ import annotations

import os
import signal
import time

from p2p.sides import BIG, BLOCKS, Sides, address_of, begin, check_carrier, send_and_check
from serving.process import Side, eventually, freeze

SHARED = {**BIG, "shared": True}
BACK_S = 10.0  # 0.5 s are promised; this machine may be busy with other things


def stopped_reader(sides: Sides, *, lease_s: float, heartbeat_s: float) -> tuple[Side, Side, dict[str, str]]:
    """A sender, a reader that was stopped when all but one layer was still to be read, and what it had then."""
    sender = sides.start(caches={**SHARED, "seed": 1}, lease_s=lease_s, heartbeat_s=heartbeat_s)
    reader = sides.start(caches={**SHARED, "seed": 2}, heartbeat_s=20)
    reader.call("receive", name="t", blocks=BLOCKS, timeout_s=60)
    sender.call("send", name="t", blocks=BLOCKS, to=address_of(reader), layer_wise=True)
    sender.call("layer_ready", name="t", layer=0)
    reader.call("wait_layer", name="t", layer=0)
    check_carrier(sender, "ipc")
    before = reader.call("digest", blocks=BLOCKS)
    freeze(reader.pid)
    for layer in (1, 2, 3):
        sender.call("layer_ready", name="t", layer=layer)
    return sender, reader, before


def test_a_reader_that_stops_while_its_lease_runs_out(sides: Sides) -> None:
    """Its blocks are kept and counted, until it says that it has stopped; others are served meanwhile."""
    sender, reader, before = stopped_reader(sides, lease_s=4.0, heartbeat_s=30)
    bystander = sides.start(caches={**SHARED, "seed": 3}, heartbeat_s=30)
    eventually(lambda: sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 1, 20)
    send_and_check(sender, bystander, "other")
    time.sleep(1)
    assert not sender.call("done", what="send t")["done"]
    assert sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 1
    os.kill(reader.pid, signal.SIGCONT)
    assert sender.call("wait", what="send t", timeout_s=20)["code"] == "expired"
    assert reader.call("wait", what="receive t", timeout_s=20)["code"] == "expired"
    # The layers had become ready for it, but it begins no copy after the end of the lease.
    assert reader.call("digest", blocks=BLOCKS) == before
    assert sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 0
    send_and_check(sender, reader, "next")


def test_a_reader_that_is_silent_until_its_session_ends(sides: Sides) -> None:
    """The session is over, the process lives: its blocks are kept until it goes on and finds out."""
    sender, reader, _ = stopped_reader(sides, lease_s=30, heartbeat_s=0.5)
    eventually(lambda: not sender.call("stats")["stats"]["peers"], 20)
    time.sleep(1)
    assert not sender.call("done", what="send t")["done"]
    os.kill(reader.pid, signal.SIGCONT)
    assert sender.call("wait", what="send t", timeout_s=20)["code"] == "peer_gone"
    assert reader.call("wait", what="receive t", timeout_s=20)["code"] == "peer_gone"
    send_and_check(sender, reader, "next")
    check_carrier(sender, "ipc")


def test_a_silent_reader_that_is_killed(sides: Sides) -> None:
    sender, reader, _ = stopped_reader(sides, lease_s=1.0, heartbeat_s=0.5)
    eventually(lambda: sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 1, 20)
    assert not sender.call("done", what="send t")["done"]
    reader.kill()
    assert sender.call("wait", what="send t", timeout_s=20)["code"] in ("peer_gone", "expired")
    eventually(lambda: sender.call("stats")["stats"]["blocks_kept_beyond_lease"] == 0)


def test_an_engine_that_ends_while_it_is_read(sides: Sides) -> None:
    """It says so, and the reader stops; both go on living."""
    sender = sides.start(caches={**SHARED, "seed": 1})
    reader = sides.start(caches={**SHARED, "seed": 2})
    own = reader.memfd_inodes()
    begin(sender, reader, "t")
    sender.answer()
    sender.call("close")
    assert reader.call("wait", what="receive t", timeout_s=20)["code"] in ("closed", "peer_gone", None)
    assert sender.call("wait", what="send t", timeout_s=20)["code"] in ("closed", None)
    eventually(lambda: reader.memfd_inodes() == own, BACK_S)


def test_a_forked_child_keeps_nothing_alive(sides: Sides) -> None:
    """The child has all sockets of its parent open; the parent's death is noticed all the same."""
    sender = sides.start(caches={"seed": 1, "shared": True})
    receiver = sides.start(caches={"seed": 2, "shared": True})
    own = receiver.memfd_inodes()
    send_and_check(sender, receiver, "first")
    assert receiver.memfd_inodes() != own
    child = sender.call("fork")["pid"]
    try:
        sender.kill()
        eventually(lambda: receiver.memfd_inodes() == own, BACK_S)
        assert not receiver.call("stats")["stats"]["peers"]
    finally:
        os.kill(child, signal.SIGKILL)
