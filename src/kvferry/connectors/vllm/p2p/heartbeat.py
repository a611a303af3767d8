"""What tells a router of this engine: the message of vLLM's removed connector, with a few keys more."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

EVERY_S = 3.0
VERSION = 1
_AGAIN_S = 0.2  # after which one that is not there, or does not read, is told anew: no old word waits for it
_QUEUED = 4  # messages
_LINGER_MS = 500
_LABEL = b"kvferry heartbeat 1\0"  # as in kvferry.router.heartbeat
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(frozen=True, slots=True)
class Presence:
    """What a router is told. `kinds` are P (prefill), D (decode) or both; `addresses` are those of all ranks."""

    kinds: Sequence[str]
    http_address: str
    addresses: Sequence[str]
    dp_rank: int | None = None

    def messages(self, secret: bytes | None = None, *, leaving: bool = False) -> list[bytes]:
        """One message a kind; with a `secret` a router can tell that it comes from an engine that has it."""
        return [msgspec.msgpack.encode(_signed(self._map(kind, leaving), secret)) for kind in self.kinds]

    def _map(self, kind: str, leaving: bool) -> dict[str, Any]:
        told: dict[str, Any] = {
            "type": kind,
            "http_address": self.http_address,
            "zmq_address": self.addresses[0],
            "kvferry": VERSION,
            "zmq_addresses": list(self.addresses),
        }
        if self.dp_rank is not None:
            told["dp_rank"] = self.dp_rank
        return told | {"leaving": True} if leaving else told


class Heartbeat:
    """Sends a presence every 3 s until it is closed.

    One thread, `kvferry-heartbeat`, has the socket. It ends with `close`, or with the process: vLLM does not always
    tell a connector that it is over.
    """

    def __init__(
        self, proxy: str, presence: Presence, *, secret: bytes | None = None, every_s: float = EVERY_S
    ) -> None:
        self._proxy = proxy
        self._presence = presence
        self._secret = secret
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
            sock.setsockopt(zmq.IMMEDIATE, 1)
            sock.setsockopt(zmq.IPV6, 1)
            try:
                sock.connect(f"tcp://{self._proxy}")
            except zmq.ZMQError as error:
                _LOG.error("no router hears of this engine: %s cannot be reached: %s", self._proxy, error)
                return
            while not self._stop.is_set():
                sent = _send(sock, self._presence.messages(self._secret))
                self._stop.wait(self._every_s if sent else min(self._every_s, _AGAIN_S))
            _send(sock, self._presence.messages(self._secret, leaving=True))


def _signed(told: dict[str, Any], secret: bytes | None) -> dict[str, Any]:
    """The same, and once more with the time and a MAC: old proxies read the keys that they know."""
    if secret is None:
        return told
    signed = msgspec.msgpack.encode(told | {"sent_at": time.time()})
    return told | {"signed": signed, "mac": hmac.digest(secret, _LABEL + signed, "sha256")}


def _send(sock: zmq.Socket[bytes], messages: Sequence[bytes]) -> bool:
    """Whether the router takes them: not where it is not there, or does not read."""
    try:
        for message in messages:
            sock.send(message, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
