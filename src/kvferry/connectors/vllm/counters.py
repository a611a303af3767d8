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
P2P_COUNTERS: Mapping[str, str] = {
    "p2p_sends": "Transfers to decode engines that ended well, each rank's counted.",
    "p2p_sends_failed": "Transfers to decode engines that failed, or that nobody took.",
    "p2p_receives": "Transfers from prefill engines that ended well, each rank's counted.",
    "p2p_receives_failed": "Transfers from prefill engines that failed; their tokens were computed.",
    "p2p_receive_seconds": "Time that all received transfers were waited for.",
    "p2p_received_tokens": "Prompt tokens whose KV was received, or was to be.",
    "p2p_not_taken": "Transfers that were not taken: the engine had the KV itself, or the request had ended.",
    "p2p_withdrawn": "Transfers that were promised and not sent: the request ended before its prompt was computed.",
    "p2p_refused": "Requests whose kv_transfer_params, or old request id, made no sense; their tokens were computed.",
}
_MEANS = {"load_seconds": ("loads", "load_ms"), "p2p_receive_seconds": ("p2p_receives", "p2p_receive_ms")}


class Counters:
    """Counts up until `take`. One thread."""

    def __init__(self, known: Mapping[str, str] = COUNTERS) -> None:
        self._known = known
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """`name` is one of those that are known."""
        if name not in self._known:
            raise KeyError(name)
        self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was counted since the last time, without zeros."""
        taken, self._counts = self._counts, {}
        return taken


def summary(counts: Mapping[str, float]) -> dict[str, int | float]:
    """What a log line shows of the counts of an interval."""
    known = (*COUNTERS, *P2P_COUNTERS)
    shown: dict[str, int | float] = {name: int(counts[name]) for name in known if counts.get(name)}
    for seconds, (number, mean) in _MEANS.items():
        shown.pop(seconds, None)
        if counts.get(number):
            shown[mean] = round(counts.get(seconds, 0.0) * 1e3 / counts[number], 1)
    return shown
