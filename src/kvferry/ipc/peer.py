"""Who is at the other end of a socket, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59  # the numbers are the kernel's
_SO_PEERPIDFD = 77  # Linux 6.5
_MAX_GROUPS_BYTES = 1024  # what Python reads of an option


class Credentials(NamedTuple):
    """What the kernel says about the process that connected. `pid` is 0 where it is not visible from here."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Credentials:
    """The credentials that the peer had when it connected."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def groups_of(sock: socket.socket) -> set[int]:
    """The supplementary groups that the peer had when it connected; none where they are more than can be read."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    except OSError:
        return set()
    return {gid for (gid,) in struct.iter_unpack("I", data)}


def open_pidfd(sock: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer's process ends; None where there is no way to get one.

    Hanging up is then the only sign of its death. Raises ProcessLookupError where it has ended already.
    """
    pid = credentials(sock).pid
    for attempt in (_pidfd_of_socket, _pidfd_of_pid):
        try:
            return attempt(sock, pid)
        except ProcessLookupError:
            if pid > 0:
                raise
        except OSError:
            continue  # this kernel has no such call, or the process is not visible from here
    return None


def _pidfd_of_socket(sock: socket.socket, _pid: int) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)


def _pidfd_of_pid(_sock: socket.socket, pid: int) -> int:
    return os.pidfd_open(pid)
