"""What all requests of one router share."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

from kvferry.router.calls import EngineCalls
from kvferry.router.config import RouterConfig
from kvferry.router.engines import Engines
from kvferry.router.measures import Measures

__all__ = ["Front"]


@dataclass
class Front:
    """Made in the event loop, and used there alone. Once `ended` is done, requests that go on are broken off.

    `via` is this router in the header of that name: a request that has it comes from itself.
    """

    config: RouterConfig
    calls: EngineCalls
    engines: Engines
    measures: Measures
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    via: bytes = field(default_factory=lambda: b"1.1 kvferry-" + secrets.token_hex(8).encode())
    num_requests: int = 0
