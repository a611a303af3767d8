"""vLLM's view of the connector: each hook is handed on to the scheduler's or the worker's side."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.connectors.vllm import engine
from kvferry.connectors.vllm.hooks import OutcomeHooks
from kvferry.connectors.vllm.plans import StepPlan, WorkReport
from kvferry.connectors.vllm.refusals import refusal
from kvferry.connectors.vllm.scheduler import SchedulerSide
from kvferry.connectors.vllm.settings import ConnectorSettings
from kvferry.connectors.vllm.stats import KVFerryPromMetrics
from kvferry.connectors.vllm.worker import WorkerSide

_LOG = logging.getLogger("vllm.kvferry")
_NOTHING = StepPlan()

KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(WorkReport)
with contextlib.suppress(ValueError):  # vLLM's MultiConnector looks its children up by name, for their statistics
    KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.connectors.vllm", "KVFerryConnector")


class KVFerryConnector(OutcomeHooks, KVConnectorBase_V1, SupportsHMA):
    """Reuses KV through a KVferry cache server. Loads and stores run beside the engine's steps.

    Whatever goes wrong between engine and server, requests are computed as if there were no server, and the log says
    why. Mistakes in the configuration raise ValueError at the start.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = ConnectorSettings.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._refusal = refusal(vllm_config, kv_cache_config, can_sleep=engine.CAN_SLEEP)
        self._kv_caches: dict[str, Any] = {}
        if role is KVConnectorRole.WORKER:
            self._worker = engine.worker_side(self._settings)
            return
        engine.warn_of_failure_policy(self._kv_transfer_config)
        if self._refusal is None:
            self._scheduler = engine.scheduler_side(vllm_config, kv_cache_config, self._settings)
        else:
            _LOG.error("KVferry neither stores nor reuses KV here: %s.", self._refusal)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.jobs.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return _NOTHING if self._scheduler is None else self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkReport):
            self._scheduler.ended(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.expects_ends()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.frees_soon()

    def reset_cache(self) -> bool:
        return self._scheduler is None or self._scheduler.reset()

    # Worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = kv_caches
        self.restore_kv_caches()

    def unregister_kv_caches(self) -> None:
        """The engine goes to sleep (vLLM 0.33): the server lets go of the memory, and keeps what it has stored."""
        if self._worker is not None:
            self._worker.use(None)

    def restore_kv_caches(self) -> None:
        """The engine is awake, with other memory at the same addresses: to the server it is a new registration."""
        if self._worker is None or self._refusal is not None or not self._kv_caches:
            return
        self._worker.use(None)
        self._worker.use(engine.register(self._vllm_config, self._kv_cache_config, self._settings, self._kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores begin after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_stores(self._plan)

    # Both.

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan


KVFerryConnector._cache_hit_source = engine.hit_source("HOST")
