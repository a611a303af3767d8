"""How both ends of a TCP connection set it up."""

from __future__ import annotations

import socket

_IDLE_S = 5
_PROBES = 2
_GONE_S = _IDLE_S * (_PROBES + 1)


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice a host that is gone within 15 s, also while data waits for it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_S * 1000)
