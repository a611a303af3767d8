"""Figures of benchmarks/vllm_*.py, as `kvferry bench` prints them, and how many tokens are equal."""

from __future__ import annotations

from typing import Any

TOKENS = 16  # that are compared, of each prompt


def figure(name: str, value: float | None, limit: float | None = None, unit: str = "ms") -> dict[str, Any]:
    ratio = None if limit is None or value is None else round(value / limit, 4)
    value, limit = (None if number is None else round(number, 3) for number in (value, limit))
    return {"name": name, "value": value, "unit": unit, "limit": limit, "ratio": ratio}


def same(one: list[int], other: list[int]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))
