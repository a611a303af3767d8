"""The socket to one peer, and who is told of what comes over it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Protocol

from kvferry.p2p.carriers.ipc.caches import PeerCaches
from kvferry.p2p.signal.session import Session


class DoorEvents(Protocol):
    """Called in other threads; each call only queues."""

    def peer_left(self, session: Session) -> None:
        """The peer has hung up, or its process has ended: the session is over."""

    def peer_reads_no_more(self, session: Session) -> None:
        """It has said so, or its process has ended."""


@dataclass(slots=True, eq=False)
class Door:
    """The socket to one peer. `pidfd` is None where there is none; `reads` until it reads this engine's KV no more."""

    session: Session
    sock: socket.socket
    pidfd: int | None
    caches: PeerCaches
    reads: bool = True

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.sock.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)
