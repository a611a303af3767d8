"""The server's values as Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily

from kvferry.server.watch.measures import MEASURES, Measure

PREFIX = "kvferry_"

# Members of families: `NAME_LABEL`, or `LABEL_NAME` for tiers.
_MEMBERS = (
    re.compile(r"(?P<name>misses|chunks_skipped|sessions_refused|registrations_refused)_(?P<label>.+)"),
    re.compile(r"(?P<name>held_bytes)_(?P<label>.+)"),
    re.compile(r"(?P<label>disk|remote)_(?P<tier_name>.+)"),
)
_MEMORY = {"memory_bytes": "tier_capacity_bytes", "memory_used_bytes": "tier_used_bytes"}


class Sample(NamedTuple):
    """One value: its name in `MEASURES`, and its label there, empty where it has none."""

    name: str
    label: str
    value: float


def metrics_of(values: Mapping[str, float]) -> Iterator[Metric]:
    """The metrics, in the order in which they first come. What `MEASURES` does not know is of no known type."""
    families: dict[str, Metric] = {}
    for sample in samples_of(values):
        measure = MEASURES.get(sample.name)
        family = families.get(sample.name)
        if family is None:
            family = families[sample.name] = _family(sample.name, measure)
        labels = {measure.label: sample.label} if measure is not None and measure.label else {}
        suffix = "_total" if family.type == "counter" else ""
        family.add_sample(PREFIX + sample.name + suffix, labels, sample.value)
    yield from families.values()


def _family(name: str, measure: Measure | None) -> Metric:
    if measure is None:
        return UnknownMetricFamily(PREFIX + name, name)
    kind = GaugeMetricFamily if measure.is_gauge else CounterMetricFamily
    return kind(PREFIX + name, measure.help)


def samples_of(values: Mapping[str, float]) -> Iterator[Sample]:
    """What each of the server's values is called in `MEASURES`; sums over a label are left out."""
    for name, value in values.items():
        family, label = _member_of(name)
        if family in MEASURES:
            yield Sample(family, label, value)
        elif name not in MEASURES or not MEASURES[name].label:
            yield Sample(name, "", value)


def _member_of(name: str) -> tuple[str, str]:
    """The family that a value would belong to, and its label there."""
    if name in _MEMORY:
        return _MEMORY[name], "memory"
    found = next((match.groupdict() for pattern in _MEMBERS if (match := pattern.fullmatch(name))), None)
    return ("", "") if found is None else (found.get("name") or f"tier_{found['tier_name']}", found["label"])
