"""KVferry's connector for vLLM: `kv_connector_module_path: kvferry.connectors.vllm`, `kv_connector: KVFerryConnector`.

vLLM itself is imported with the class, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KVFerryConnector as KVFerryConnector

__all__ = ["KVFerryConnector"]


def __getattr__(name: str) -> object:
    if name != "KVFerryConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvferry.connectors.vllm.connector").KVFerryConnector
