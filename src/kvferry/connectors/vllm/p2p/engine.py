"""Where the connector touches vLLM's other parts, and where their releases differ."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip

from kvferry.connectors.vllm.caches import choose_format, hints_for
from kvferry.connectors.vllm.engine import CAN_DROP_LOADS, cpu_isa, rehome_caches
from kvferry.connectors.vllm.p2p.handover import Part
from kvferry.connectors.vllm.p2p.heartbeat import Heartbeat, Presence
from kvferry.connectors.vllm.p2p.ranks import Rank
from kvferry.connectors.vllm.p2p.scheduler import PeerScheduler
from kvferry.connectors.vllm.p2p.settings import P2pSettings
from kvferry.connectors.vllm.p2p.worker import PeerWorker, WorkerRules
from kvferry.connectors.vllm.refusals import layer_specs
from kvferry.errors import KVFerryError, ShareError
from kvferry.p2p import P2pConfig, P2pNcclEngine
from kvferry.settings import join_host_port

_LOG = logging.getLogger("vllm.kvferry")


def scheduler_side(vllm_config: Any, kv_cache_config: Any, settings: P2pSettings) -> PeerScheduler:
    """The scheduler's side."""
    transfer = vllm_config.kv_transfer_config
    part = Part(
        sends=transfer.is_kv_producer,
        receives=transfer.is_kv_consumer,
        get=settings.send_type == "GET",
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
    )
    return PeerScheduler(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size, part)


def worker_side(
    vllm_config: Any, kv_cache_config: Any, settings: P2pSettings, kv_caches: Mapping[str, torch.Tensor]
) -> PeerWorker:
    """This rank's side, listening. Where its caches are of no kind that can be handed over it only fails what it gets.

    Raises ValueError where nothing can listen at the configured address.
    """
    specs, num_blocks = layer_specs(kv_cache_config.kv_cache_groups[0]), kv_cache_config.num_blocks
    engine, kind = None, ""
    try:
        kind = choose_format(kv_caches, specs, num_blocks)
        on_cpu = next(iter(kv_caches.values())).device.type == "cpu"
        engine = _listening(vllm_config, settings, on_cpu=on_cpu)
        isa = ""
        if on_cpu:
            isa = cpu_isa(vllm_config, next(iter(specs.values())))
            rehome_caches(vllm_config, kv_caches)
        hints = hints_for(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size, num_blocks, isa=isa)
        named = _named(kv_caches, _model(vllm_config, settings, isa))
        engine.register_kv_caches(named, format=kind, layout_hints=hints)
    except KVFerryError as error:
        if engine is not None:
            engine.close()
            engine = None
        _LOG.error("KVferry hands over no KV here: %s.", error)
    return PeerWorker(engine, _worker_rules(vllm_config, settings, kv_caches, is_mla=kind == "mla"))


def heartbeat(vllm_config: Any, settings: P2pSettings, addresses: tuple[str, ...]) -> Heartbeat | None:
    """Tells the router of this engine, where there is one to be told."""
    if settings.proxy is None:
        return None
    transfer = vllm_config.kv_transfer_config
    kinds = ["P"] * transfer.is_kv_producer + ["D"] * transfer.is_kv_consumer
    http_address = join_host_port(settings.host(get_ip), settings.http_port)
    presence = Presence(kinds, http_address, addresses, _routed_rank(vllm_config))
    return Heartbeat(settings.proxy, presence, secret=settings.secret)


def _listening(vllm_config: Any, settings: P2pSettings, *, on_cpu: bool) -> P2pNcclEngine:
    config = _config(vllm_config, settings, on_cpu=on_cpu)
    try:
        return P2pNcclEngine(config)
    except ShareError as error:
        raise ValueError(f"P2pNcclConnector: {error}; set another kv_port, 0 for any free one") from None


def _config(vllm_config: Any, settings: P2pSettings, *, on_cpu: bool) -> P2pConfig:
    parallel = vllm_config.parallel_config
    return settings.p2p_config(
        settings.host(get_ip),
        rank=get_tensor_model_parallel_rank(),
        size=parallel.tensor_parallel_size,
        data_rank=getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
        keeps=on_cpu and vllm_config.kv_transfer_config.is_kv_consumer,  # blocks of a GPU stay with their sender
    )


def _worker_rules(
    vllm_config: Any, settings: P2pSettings, kv_caches: Mapping[str, torch.Tensor], *, is_mla: bool
) -> WorkerRules:
    parallel = vllm_config.parallel_config
    return WorkerRules(
        rank=Rank(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size, replicated=is_mla),
        layers=_items(kv_caches),
        send_type=settings.send_type,
        lease_s=settings.lease_s,
        # Where a batch is computed in two halves each half says that a layer is done, the first too early.
        layer_wise=not (parallel.enable_dbo or getattr(parallel, "ubatch_size", 0) > 1),
        can_drop_loads=CAN_DROP_LOADS,
    )


def _items(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Which item of a transfer each layer is: layers that use another's tensor are one with it."""
    numbers: dict[tuple[Any, ...], int] = {}
    return {
        name: numbers.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), len(numbers))
        for name, tensor in kv_caches.items()
    }


def _named(kv_caches: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """The caches, of which the first is named after the model, too: engines compare names when they meet."""
    first, *rest = kv_caches
    return {f"{model}:{first}": kv_caches[first], **{name: kv_caches[name] for name in rest}}


def _model(vllm_config: Any, settings: P2pSettings, isa: str) -> str:
    """What two engines must have in common, beside the shapes of their caches, as far as it can be told cheaply."""
    kind = "+".join(getattr(vllm_config.model_config.hf_config, "architectures", None) or ["model"])
    return "/".join(filter(None, (settings.model_id or kind[:100], str(vllm_config.cache_config.cache_dtype), isa)))


def _routed_rank(vllm_config: Any) -> int | None:
    """The data-parallel rank that a request has to name to get to this engine; None where it need not name any."""
    if getattr(vllm_config.parallel_config, "data_parallel_external_lb", False):
        return None
    match = re.search(r"_dp(\d+)$", vllm_config.kv_transfer_config.engine_id)
    return None if match is None else int(match[1])
