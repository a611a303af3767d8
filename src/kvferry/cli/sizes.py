"""Amounts of memory as people write them."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`4GiB`, `512MiB`, `2e9`, `1.5 GB` or plain bytes, as bytes. Raises `ValueError`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no amount of memory; write for example 4GiB, 512MiB or 1000000000")
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """`67108864` as `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
