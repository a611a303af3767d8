"""What the connector counts: plain numbers by name, which vLLM carries from each process to where it logs them."""

from __future__ import annotations

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "lookups": "Lookups in the cache server.",
    "hit_tokens": "Prompt tokens whose KV was loaded, or began to be.",
    "unkeyed_requests": "Requests whose KV no key can express, e.g. with prompt embeddings.",
    "loads": "Loads that ended well, each rank's counted.",
    "loads_failed": "Loads that failed; their tokens were computed.",
    "load_seconds": "Time from the start to the end of all loads that ended well.",
    "stores": "Stores that ended well, each rank's counted.",
    "stores_failed": "Stores that failed.",
    "stores_held_back": "Stores that waited because earlier ones kept too many blocks.",
    "chunks_stored": "Chunks written by the server.",
    "chunks_present": "Chunks that it had already.",
    "chunks_skipped": "Chunks that it had no room for.",
}


class Counters:
    """Counts up until `take`. One thread."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """`name` is one of `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(name)
        self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was counted since the last time, without zeros."""
        taken, self._counts = self._counts, {}
        return taken


def summary(counts: Mapping[str, float]) -> dict[str, int | float]:
    """What a log line shows of the counts of an interval."""
    shown: dict[str, int | float] = {name: int(counts[name]) for name in COUNTERS if counts.get(name)}
    seconds = counts.get("load_seconds", 0.0)
    shown.pop("load_seconds", None)
    if counts.get("loads"):
        shown["load_ms"] = round(seconds * 1e3 / counts["loads"], 1)
    return shown
