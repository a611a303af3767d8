"""What the router counts: each name once, for Prometheus and for docs/router.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from kvferry import __version__

__all__ = ["MEASURES", "Measure", "Measures"]

_PREFIX = "kvferry_router_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Measure(NamedTuple):
    """`kind` is what Prometheus calls it; `label` is empty where there is none."""

    kind: str
    label: str
    help: str


MEASURES: Mapping[str, Measure] = {
    "requests": Measure("counter", "outcome", "Requests for completions that have ended."),
    "requests_going_on": Measure("gauge", "", "Requests for completions that have not."),
    "retries": Measure("counter", "failed", "Tries made again, by which engine had failed."),
    "alone": Measure("counter", "reason", "Tries in which a decode engine computed the prompt itself."),
    "engines": Measure("gauge", "role", "Engines that may be asked."),
    "engines_joined": Measure("counter", "role", "Engines that came, or came back."),
    "engines_lost": Measure("counter", "role", "Engines that were silent for too long."),
    "heartbeats": Measure("counter", "outcome", "Messages at the address for heartbeats."),
    "prompt_bytes": Measure("counter", "", "Prompts that prefill engines were asked to read."),
    "prompt_bytes_seen": Measure("counter", "", "Of these, what the engine chosen had been sent before."),
    "first_byte_seconds": Measure("histogram", "", "From a request to its answer's first byte."),
    "request_seconds": Measure("histogram", "", "From a request to its answer's last byte, or to its end without."),
}
# The values of labels, so that each is there from the start on.
LABELS: Mapping[str, tuple[str, ...]] = {
    "requests": ("answered", "refused", "failed", "broken_off", "timed_out", "client_left"),
    "retries": ("prefill", "decode"),
    "alone": ("no_prefill", "prefill_failed", "prefill_refused", "prompt_wanted"),
    "engines": ("prefill", "decode"),
    "engines_joined": ("prefill", "decode"),
    "engines_lost": ("prefill", "decode"),
    "heartbeats": ("taken", "garbage", "untrusted", "no_room"),
}


class Measures:
    """The numbers of one router. In the event loop's thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {name: self._made(name, measure) for name, measure in MEASURES.items()}
        for name, values in LABELS.items():
            for value in values:
                self._metrics[name].labels(value)
        build = Gauge(_PREFIX + "build_info", "Always 1; the label says which.", ["version"], registry=self._registry)
        build.labels(__version__).set(1)
        ProcessCollector(registry=self._registry)

    def count(self, name: str, label: str = "", by: float = 1) -> None:
        """Add to a counter."""
        metric = self._metric(name, label)
        assert isinstance(metric, Counter)
        metric.inc(by)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Say what a gauge is now."""
        metric = self._metric(name, label)
        assert isinstance(metric, Gauge)
        metric.set(value)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        metric = self._metric(name, "")
        assert isinstance(metric, Histogram)
        metric.observe(value)

    def as_text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

    def _metric(self, name: str, label: str) -> Counter | Gauge | Histogram:
        metric = self._metrics[name]
        return metric.labels(label) if label else metric

    def _made(self, name: str, measure: Measure) -> Counter | Gauge | Histogram:
        labels = [measure.label] if measure.label else []
        if measure.kind == "histogram":
            return Histogram(_PREFIX + name, measure.help, labels, registry=self._registry, buckets=_SECONDS)
        kind = Counter if measure.kind == "counter" else Gauge
        return kind(_PREFIX + name, measure.help, labels, registry=self._registry)
