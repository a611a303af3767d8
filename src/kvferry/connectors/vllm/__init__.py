"""KVferry's connectors for vLLM, by `kv_connector_module_path: kvferry.connectors.vllm`.

`KVFerryConnector` reuses KV through a cache server, `P2pNcclConnector` hands it from prefill to decode engines. vLLM
itself is imported with the class, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KVFerryConnector as KVFerryConnector
    from kvferry.connectors.vllm.p2p.connector import P2pNcclConnector as P2pNcclConnector
    from kvferry.connectors.vllm.p2p.layers import extract_kv_from_layer as extract_kv_from_layer
    from kvferry.connectors.vllm.p2p.layers import inject_kv_into_layer as inject_kv_into_layer

_HOMES = {
    "KVFerryConnector": "kvferry.connectors.vllm.connector",
    "P2pNcclConnector": "kvferry.connectors.vllm.p2p.connector",
    "extract_kv_from_layer": "kvferry.connectors.vllm.p2p.layers",
    "inject_kv_into_layer": "kvferry.connectors.vllm.p2p.layers",
}

__all__ = ["KVFerryConnector", "P2pNcclConnector", "extract_kv_from_layer", "inject_kv_into_layer"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
