"""What is counted and shown."""

from __future__ import annotations

import pytest

from kvferry.connectors.vllm.counters import Counters, summary


def test_counts_are_taken_once() -> None:
    counters = Counters()
    counters.add("loads")
    counters.add("loads", 2)
    assert counters.take() == {"loads": 3}
    assert counters.take() == {}
    with pytest.raises(KeyError):
        counters.add("lodes")


def test_a_log_line_shows_the_mean_time_of_a_load() -> None:
    assert summary({"loads": 4, "load_seconds": 0.1, "stores": 0}) == {"loads": 4, "load_ms": 25.0}
