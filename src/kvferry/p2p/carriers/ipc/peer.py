"""Who is at the other end of a Unix socket, and whether that process still lives."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from kvferry.errors import ShareError

_SO_PEERPIDFD = 77  # from Linux 6.5 on
_UCRED = struct.Struct("iII")


def check_user(sock: socket.socket) -> None:
    """Raise ShareError where the process at the other end is another user's."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise ShareError(f"the other engine runs as user {uid}, this one as {os.geteuid()}: KV memory is not shared")


def open_pidfd(sock: socket.socket) -> int:
    """A descriptor that becomes readable when that process has ended; -1 where the kernel gives none.

    Hanging up is then the only sign of its end. Raises ProcessLookupError where it has ended already.
    """
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if pid <= 0:
        return -1  # of another pid namespace
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
