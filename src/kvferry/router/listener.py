"""The socket at which engines say that they are there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from kvferry.errors import ShareError, WireError
from kvferry.router.heartbeat import MAX_HEARTBEAT_BYTES, Heartbeat, UntrustedError, decode_heartbeat
from kvferry.settings import join_host_port, split_host_port

__all__ = ["HeartbeatListener"]

_LOG = logging.getLogger(__name__)

_AT_ONCE = 64
_QUEUED = 256
_SAY_AGAIN_S = 60.0
_PING_MS, _PONG_MS = 10_000, 30_000


class HeartbeatListener:
    """Listens when made; `run` hears. In the event loop's thread, between whose other work it takes a few at a time."""

    def __init__(
        self,
        address: str,
        take: Callable[[Heartbeat], None],
        refused: Callable[[str], None],
        *,
        secret: bytes | None = None,
    ) -> None:
        """`address` is HOST:PORT; raises ShareError where it cannot be had.

        `refused` is told in a word of what is none, or, where there is a `secret`, was not signed by it.
        """
        self._take = take
        self._refused = refused
        self._secret = secret
        self._say_again_at = 0.0
        host, port = split_host_port(address)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEARTBEAT_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an engine that was started again has its old name
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        try:
            self._socket.bind(f"tcp://{join_host_port(host, port)}")
        except zmq.ZMQError as error:
            self.close()
            raise ShareError(f"heartbeats cannot be heard at {address}: {error}; choose another address") from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = join_host_port(host, int(bound.rpartition(":")[2]))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._socket.poll()
            for _ in range(_AT_ONCE):
                try:
                    frames = await self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._heard(frames)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close(0)
        self._context.term()

    def _heard(self, frames: list[bytes]) -> None:
        """The name of who sent it comes first, as ZeroMQ wants it, and an empty frame from some."""
        try:
            if not 2 <= len(frames) <= 3 or any(frames[1:-1]):
                raise WireError(f"no heartbeat: it has {len(frames)} frames")
            heartbeat = decode_heartbeat(frames[-1], self._secret, time.time())
        except UntrustedError as error:
            self._refused("untrusted")
            if time.monotonic() >= self._say_again_at:
                self._say_again_at = time.monotonic() + _SAY_AGAIN_S
                _LOG.warning("a heartbeat is refused: %s", error)
        except WireError as error:
            self._refused("garbage")
            _LOG.debug("at the address for heartbeats: %s", error)
        else:
            self._take(heartbeat)
