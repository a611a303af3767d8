"""vLLM's view of the connector: each hook is handed on to the scheduler's or the worker's side."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.connectors.vllm.engine import hit_source, warn_of_failure_policy
from kvferry.connectors.vllm.hooks import OutcomeHooks
from kvferry.connectors.vllm.p2p import engine
from kvferry.connectors.vllm.p2p.heartbeat import Heartbeat
from kvferry.connectors.vllm.p2p.plans import PeerPlan
from kvferry.connectors.vllm.p2p.scheduler import PeerScheduler
from kvferry.connectors.vllm.p2p.settings import P2pSettings
from kvferry.connectors.vllm.p2p.worker import PeerWorker
from kvferry.connectors.vllm.plans import WorkReport
from kvferry.connectors.vllm.refusals import refusal
from kvferry.connectors.vllm.stats import P2pPromMetrics

_LOG = logging.getLogger("vllm.kvferry")
_NOTHING = PeerPlan()

KVConnectorMetadata.register(PeerPlan)
KVConnectorWorkerMetadata.register(WorkReport)
with contextlib.suppress(ValueError):  # vLLM's MultiConnector looks its children up by name, for their statistics
    KVConnectorFactory.register_connector("P2pNcclConnector", "kvferry.connectors.vllm", "P2pNcclConnector")


@dataclass(frozen=True)
class RankAddress(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler's side: where its engine is reached."""

    address: str


class P2pNcclConnector(OutcomeHooks, KVConnectorBase_V1, SupportsHMA):
    """Prefill in one engine, decode in another: the KV of a prompt goes from blocks to blocks, asynchronously.

    Whatever goes wrong between the two, the decode engine computes the prompt itself, and the log says why. Mistakes
    in the configuration raise ValueError at the start.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = P2pSettings.of(self._kv_transfer_config)
        self._scheduler: PeerScheduler | None = None
        self._worker: PeerWorker | None = None
        self._heartbeat: Heartbeat | None = None
        self._refusal = refusal(vllm_config, kv_cache_config, can_sleep=False)
        if role is KVConnectorRole.WORKER:
            return
        warn_of_failure_policy(self._kv_transfer_config)
        if self._refusal is None:
            self._scheduler = engine.scheduler_side(vllm_config, kv_cache_config, self._settings)
        else:
            _LOG.error("KVferry hands over no KV here: %s.", self._refusal)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler's side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Called once, with what each rank told: now it is known where this engine is reached."""
        ranks = [metadata.get(rank) for rank in range(self._vllm_config.parallel_config.tensor_parallel_size)]
        addresses = tuple(rank.address for rank in ranks if isinstance(rank, RankAddress))
        if self._scheduler is not None and len(addresses) == len(ranks):
            self._scheduler.own_addresses = addresses
            self._heartbeat = engine.heartbeat(self._vllm_config, self._settings, addresses)
            _LOG.info("KVferry hands KV over; the addresses of this engine's ranks are %s", ", ".join(addresses))

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

    def build_connector_meta(self, scheduler_output: Any) -> PeerPlan:
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
        """What is still sent from the request's blocks is held by its job, so vLLM may let go of them."""
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.expects_ends()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.frees_soon()

    # Worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._refusal is None and kv_caches:
            self._worker = engine.worker_side(self._vllm_config, self._kv_cache_config, self._settings, kv_caches)

    def get_handshake_metadata(self) -> RankAddress | None:
        address = None if self._worker is None else self._worker.address
        return None if address is None else RankAddress(address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """What a request waits for is there before it is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer_saved(self._plan, layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.forward_done(self._plan)

    # Both.

    def shutdown(self) -> None:
        for part in (self._heartbeat, self._worker):
            if part is not None:
                part.close()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> P2pPromMetrics:
        return P2pPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _plan(self) -> PeerPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, PeerPlan)
        return plan


P2pNcclConnector._cache_hit_source = hit_source("P2P")
