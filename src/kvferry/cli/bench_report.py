"""What a benchmark prints: one object for programs, one table for people."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Result", "as_object", "median_time_s", "rate_result", "show"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One figure. `limit` was measured in the same run, in the same unit; `ratio` is value / limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    about: str = ""


def rate_result(name: str, num_bytes: int, seconds: float, limit_seconds: float, about: str) -> Result:
    """A rate of bytes, beside that of the plain copy of the same bytes."""
    return Result(
        name, num_bytes / seconds / 1e9, "GB/s", num_bytes / limit_seconds / 1e9, limit_seconds / seconds, about
    )


def median_time_s(action: Callable[[], object], repeats: int) -> float:
    """The median time of `action`, which blocks until its work is done."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def as_object(bench: str, machine: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    return {"bench": bench, "machine": machine, "results": [dataclasses.asdict(result) for result in results]}


def show(console: Console, bench: str, results: Sequence[Result]) -> None:
    table = Table(title=f"kvferry bench {bench}")
    for column in ("name", "value", "limit", "ratio"):
        # A name that is cut short could be that of several results.
        table.add_column(column, justify="left" if column == "name" else "right", overflow="fold")
    table.add_column("what was measured")
    for result in results:
        limit = "" if result.limit is None else f"{result.limit:.4g} {result.unit}"
        ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
        table.add_row(result.name, f"{result.value:.4g} {result.unit}", limit, ratio, result.about)
    console.print(table)
