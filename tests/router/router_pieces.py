"""Engines, addresses and heartbeats for the tests of the router's pure parts."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.registry import Engine


def address(role: str, number: int, *, kv: int = 1, **fields: Any) -> EngineAddress:
    """Engine `number` of its kind, with so many ranks."""
    key = EngineKey(Role(role), f"10.0.0.{number}:8000", fields.pop("dp_rank", None))
    return EngineAddress(key, tuple(f"10.0.0.{number}:{5000 + rank}" for rank in range(kv)), **fields)


def engine(role: str, number: int, **fields: Any) -> Engine:
    return Engine(number, address(role, number, **fields))


def beat(role: str, http: str, kv: str, **more: Any) -> bytes:
    """A heartbeat as engines send it."""
    return msgspec.msgpack.encode({"type": role, "http_address": http, "zmq_address": kv, **more})
