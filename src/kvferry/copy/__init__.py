"""Copies between paged KV blocks and flat chunks."""

from __future__ import annotations

from kvferry.copy.copier import Copier
from kvferry.copy.cuda import CudaCopier
from kvferry.copy.host import HostCopier
from kvferry.copy.plan import Runs, plan_batches, plan_runs

__all__ = ["Copier", "CudaCopier", "HostCopier", "Runs", "plan_batches", "plan_runs"]
