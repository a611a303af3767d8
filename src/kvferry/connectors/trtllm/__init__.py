"""KVferry's connector for TensorRT-LLM: `connector_module` kvferry.connectors.trtllm, KVFerryScheduler, KVFerryWorker.

TensorRT-LLM itself is imported with the classes, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.trtllm.connector import KVFerryScheduler as KVFerryScheduler
    from kvferry.connectors.trtllm.connector import KVFerryWorker as KVFerryWorker

__all__ = ["KVFerryScheduler", "KVFerryWorker"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvferry.connectors.trtllm.connector"), name)
