"""A small paged-attention engine for the demo, the tests and the benchmarks."""

from __future__ import annotations

from kvferry.reference.engine import EngineConfig, Generation, ReferenceEngine, Request
from kvferry.reference.model import Model, ModelConfig
from kvferry.reference.paged import BlockPool, PagedCache, PagedConfig
from kvferry.reference.process import EngineProcess

__all__ = [
    "BlockPool",
    "EngineConfig",
    "EngineProcess",
    "Generation",
    "Model",
    "ModelConfig",
    "PagedCache",
    "PagedConfig",
    "ReferenceEngine",
    "Request",
]
