"""What tells a router of this engine: the message of vLLM's removed connector, with a few keys more."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

EVERY_S = 3.0
VERSION = 1
_QUEUED = 4  # messages; a router that is not there is told anew when it is
_LINGER_MS = 500
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(frozen=True, slots=True)
class Presence:
    """What a router is told. `kinds` are P (prefill), D (decode) or both; `addresses` are those of all ranks."""

    kinds: Sequence[str]
    http_address: str
    addresses: Sequence[str]
    dp_rank: int | None = None

    def messages(self, *, leaving: bool = False) -> list[bytes]:
        """One message a kind."""
        more: dict[str, Any] = {} if self.dp_rank is None else {"dp_rank": self.dp_rank}
        if leaving:
            more["leaving"] = True
        message = {
            "http_address": self.http_address,
            "zmq_address": self.addresses[0],
            "kvferry": VERSION,
            "zmq_addresses": list(self.addresses),
        }
        return [msgspec.msgpack.encode({"type": kind, **message, **more}) for kind in self.kinds]


class Heartbeat:
    """Sends a presence every 3 s until it is closed.

    One thread, `kvferry-heartbeat`, has the socket. It ends with `close`, or with the process: vLLM does not always
    tell a connector that it is over.
    """

    def __init__(self, proxy: str, presence: Presence, *, every_s: float = EVERY_S) -> None:
        self._proxy = proxy
        self._presence = presence
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that the engine leaves. Idempotent."""
        self._stop.set()
        self._thread.join(_LINGER_MS / 1e3 + 5.0)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.SNDHWM, _QUEUED)
            sock.setsockopt(zmq.LINGER, _LINGER_MS)
            sock.setsockopt(zmq.IPV6, 1)
            try:
                sock.connect(f"tcp://{self._proxy}")
            except zmq.ZMQError as error:
                _LOG.error("no router hears of this engine: %s cannot be reached: %s", self._proxy, error)
                return
            while not self._stop.is_set():
                _send(sock, self._presence.messages())
                self._stop.wait(self._every_s)
            _send(sock, self._presence.messages(leaving=True))


def _send(sock: zmq.Socket[bytes], messages: Sequence[bytes]) -> None:
    for message in messages:
        with contextlib.suppress(zmq.Again):  # the router does not read, or is not there
            sock.send(message, zmq.NOBLOCK)
