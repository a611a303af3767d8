"""Copies between paged KV blocks and flat chunks."""

from __future__ import annotations

from kvferry.copy.copier import Copier, Steps
from kvferry.copy.cuda import CudaCopier
from kvferry.copy.host import HostCopier
from kvferry.copy.plan import ChunkMap, CopyPlan

__all__ = ["ChunkMap", "Copier", "CopyPlan", "CudaCopier", "HostCopier", "Steps"]
