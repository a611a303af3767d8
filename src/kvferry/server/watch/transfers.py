"""How fast bytes move: how long copies, and the calls of lower tiers, took, beside how much they moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

WRITE = "write"
READ = "read"
_LABELS = ("tier", "direction")
_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class _Cell(NamedTuple):
    """Those of one tier and direction."""

    seconds: Histogram
    nbytes: Counter


@dataclass(frozen=True, slots=True)
class Moved:
    """`nbytes` went into a tier (WRITE), or out of it (READ), which took so long without what it had waited before."""

    direction: str
    nbytes: int
    seconds: float


class Transfers:
    """Belongs to the loop thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "kvferry_transfer_seconds",
            "Copies between engines and memory, and calls that wrote or read a chunk of a lower tier.",
            _LABELS,
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._nbytes = Counter("kvferry_transfer_bytes", "Bytes that these moved.", _LABELS, registry=self._registry)
        self._cells: dict[tuple[str, str], _Cell] = {}

    def add(self, tier: str, moved: Moved | None) -> None:
        """Something has moved, or nothing."""
        if moved is None:
            return
        cell = self._cells.get((tier, moved.direction))
        if cell is None:
            labels = (tier, moved.direction)
            cell = self._cells[labels] = _Cell(self._seconds.labels(*labels), self._nbytes.labels(*labels))
        cell.seconds.observe(moved.seconds)
        cell.nbytes.inc(moved.nbytes)

    def metrics(self) -> tuple[Metric, ...]:
        """All of it by now, without the times at which each was made."""
        metrics = tuple(self._registry.collect())
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        return metrics
