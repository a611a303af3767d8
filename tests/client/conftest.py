"""The fixtures of these tests."""

from __future__ import annotations

from serving.fixtures import stage, zygote

__all__ = ["stage", "zygote"]
