"""NCCL: the library, and communicators of two ranks that cannot hang the engine."""

from __future__ import annotations

from kvferry.p2p.nccl.finding import find_nccl_library
from kvferry.p2p.nccl.library import NCCLLibrary

__all__ = ["NCCLLibrary", "find_nccl_library"]
