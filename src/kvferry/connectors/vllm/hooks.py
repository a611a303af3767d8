"""What both connectors answer vLLM alike: how the worker's jobs ended, and counts."""

from __future__ import annotations

from typing import Any, Protocol

from kvferry.connectors.vllm.counters import Counters
from kvferry.connectors.vllm.engine import transfer_results
from kvferry.connectors.vllm.plans import WorkReport
from kvferry.connectors.vllm.stats import KVFerryStats


class Worker(Protocol):
    """A worker's side, as far as it is asked here."""

    counters: Counters

    def poll(self, *, idle: bool) -> None: ...
    def take_received(self) -> set[str]: ...
    def take_failed_blocks(self) -> set[int]: ...
    def take_report(self) -> WorkReport | None: ...
    @property
    def dropped(self) -> set[str]: ...


class Side(Protocol):
    """Either side."""

    counters: Counters


class Plan(Protocol):
    """A step's plan."""

    @property
    def idle(self) -> bool: ...


class OutcomeHooks:
    """A base of connectors, before vLLM's own. Each is called in vLLM's thread."""

    _scheduler: Side | None
    _worker: Worker | None

    @property
    def _plan(self) -> Plan:
        raise NotImplementedError

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.poll(idle=self._plan.idle)
        return None, self._worker.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        _, received = self.get_finished(finished_req_ids)
        results = transfer_results()
        results.finished_recving = received or set()
        if self._worker is not None:
            results.failed_recving = self._worker.dropped
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkReport | None:
        return None if self._worker is None else self._worker.take_report()

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        side = self._scheduler or self._worker
        counts = {} if side is None else side.counters.take()
        return KVFerryStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data=dict(data or {}))
