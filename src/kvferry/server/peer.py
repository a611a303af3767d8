"""Who is at the other end of a socket, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

from kvferry.errors import RequestError
from kvferry.protocol.framing import SO_PEERPIDFD

_UCRED = struct.Struct("3i")


class Credentials(NamedTuple):
    """What the kernel says about the process that connected. `pid` is 0 where it is not visible from here."""

    pid: int
    uid: int


def credentials(sock: socket.socket) -> Credentials:
    """The credentials that the peer had when it connected."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid)


def check_uid(uid: int, own_uid: int, allow_uids: Collection[int]) -> None:
    """Raise RequestError unless `uid` may use a server that runs as `own_uid`."""
    if uid != own_uid and uid not in allow_uids:
        raise RequestError(
            "uid", f"this server runs as uid {own_uid} and you as uid {uid}; start it with uid {uid} among allow_uids"
        )


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
    return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)


def _pidfd_of_pid(_sock: socket.socket, pid: int) -> int:
    return os.pidfd_open(pid)
