"""A server's process for those that want one, and the double of TensorRT-LLM."""

from __future__ import annotations

from doubles.trt_fixtures import model, start, stub
from serving.fixtures import stage, zygote

__all__ = ["model", "stage", "start", "stub", "zygote"]
