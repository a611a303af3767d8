"""Amounts of memory as people write them."""

from __future__ import annotations

import re

__all__ = ["exact_bytes", "format_bytes", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`4GiB`, `512MiB`, `2e9`, `1.5 GB` or plain bytes, as bytes. Raises `ValueError`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no amount of memory; write for example 4GiB, 512MiB or 1000000000")
    try:
        return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    except OverflowError:
        raise ValueError(f"{text!r} is more memory than there is anywhere") from None


def exact_bytes(count: int) -> str:
    """The shortest text, such as `64MiB` or `50GB`, for which `parse_bytes` gives back the same number."""
    texts = [
        f"{count // size}{unit.upper().replace('I', 'i')}B"
        for unit, size in _UNITS.items()
        if unit and not count % size
    ]
    return min((str(count), *texts), key=len) if count else "0"


def format_bytes(count: float) -> str:
    """`67108864` as `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
