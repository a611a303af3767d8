"""KV from engine to engine: signalling, transfers, and the carriers that move the bytes.

Names are loaded on first use: signalling needs ZMQ, NCCL its library, and most users one of the two at most.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.p2p.config import P2pConfig as P2pConfig
    from kvferry.p2p.engine import P2pNcclEngine as P2pNcclEngine
    from kvferry.p2p.futures import Receiving as Receiving
    from kvferry.p2p.futures import Sending as Sending

_HOMES = {
    "kvferry.p2p.config": ("P2pConfig",),
    "kvferry.p2p.engine": ("P2pNcclEngine",),
    "kvferry.p2p.futures": ("Receiving", "Sending"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'kvferry.p2p' has no attribute {name!r}")
