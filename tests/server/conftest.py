"""The fixtures of these tests."""

from __future__ import annotations

from cache.tiers.conftest import s3
from serving.fixtures import stage, zygote
from serving.tiers import make_stage

__all__ = ["make_stage", "s3", "stage", "zygote"]
