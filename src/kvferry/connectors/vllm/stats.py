"""The connector's counts, as vLLM's logger and Prometheus endpoint take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.connectors.vllm.counters import COUNTERS, P2P_COUNTERS, summary


@dataclass
class KVFerryStats(KVConnectorStats):
    """Counts by name, summed over ranks and steps."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """One counter each, `vllm:kvferry_<name>_total`, with vLLM's labels."""

    known: ClassVar[Mapping[str, str]] = COUNTERS

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](name=f"vllm:kvferry_{name}", documentation=help_text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, help_text in self.known.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount > 0:
                self._counters[name][engine_idx].inc(amount)


class P2pPromMetrics(KVFerryPromMetrics):
    """The same for what goes from engine to engine."""

    known = P2P_COUNTERS
