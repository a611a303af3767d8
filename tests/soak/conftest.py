"""The fixtures of these tests."""

from __future__ import annotations

from serving.fixtures import zygote

__all__ = ["zygote"]
