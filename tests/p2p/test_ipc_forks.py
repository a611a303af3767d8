"""What a forked child holds of the sockets between engines of one host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from p2p.sides import Sides, check_carrier, send_and_check
from serving.process import eventually


def unix_sockets(pid: int) -> set[str]:
    """Those that a process holds, as its descriptors name them."""
    known = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    held = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    return held & known


def test_a_forked_child_holds_no_door_open(sides: Sides) -> None:
    """Where a peer has no pidfd only the sockets' end tells it that this process has died."""
    sender = sides.start(caches={"seed": 1, "shared": True})
    receiver = sides.start(caches={"seed": 2, "shared": True})
    send_and_check(sender, receiver, "first")
    check_carrier(sender, "ipc")
    child = sender.call("fork")["pid"]
    try:  # it lacks where its parent listens, and the one socket to a peer
        eventually(lambda: len(unix_sockets(sender.pid) - unix_sockets(child)) == 2, 10)
        send_and_check(sender, receiver, "second")
    finally:
        os.kill(child, signal.SIGKILL)
