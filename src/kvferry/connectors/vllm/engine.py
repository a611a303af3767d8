"""Where the connector touches vLLM's other parts, and where their releases differ."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvferry.client import CacheClient
from kvferry.connectors.vllm.caches import choose_format, hints_for
from kvferry.connectors.vllm.identity import lora_name, model_name
from kvferry.connectors.vllm.keys import context_of
from kvferry.connectors.vllm.promises import ANSWER_S, Promises
from kvferry.connectors.vllm.refusals import layer_specs
from kvferry.connectors.vllm.scheduler import SchedulerRules, SchedulerSide
from kvferry.connectors.vllm.settings import ConnectorSettings
from kvferry.connectors.vllm.worker import WorkerSide
from kvferry.errors import KVFerryError
from kvferry.ipc import IPCPolicy, rehome
from kvferry.layout import chunk_tokens_for

# vLLM 0.26 has no way to take all blocks from a request whose load failed; later releases do.
CAN_DROP_LOADS = hasattr(base, "KVConnectorTransferResults")
# Releases from 0.33 on tell a connector when the engine goes to sleep, and when it is awake.
CAN_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
_LOG = logging.getLogger("vllm.kvferry")


def scheduler_side(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> SchedulerSide:
    """The scheduler's side, on a connection of its own, which need not be there yet."""
    transfer = vllm_config.kv_transfer_config
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    rules = SchedulerRules(
        block_size=block_size,
        chunk_tokens=chunk_tokens_for(block_size),
        world_size=vllm_config.parallel_config.tensor_parallel_size,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        store_generated=settings.store_generated,
        disk_wait_s=settings.disk_wait_s,
    )
    promises = Promises(
        CacheClient(settings.url, timeout_s=ANSWER_S, token=settings.token(), required=False), transfer.engine_id
    )
    name_of = lru_cache(maxsize=1024)(lora_name)
    return SchedulerSide(
        rules, promises, lambda request, epoch: context_of(request, epoch=epoch, lora_identity=name_of)
    )


def worker_side(settings: ConnectorSettings) -> WorkerSide:
    """This rank's side; until it has a client it fails all that it is given."""
    return WorkerSide(None, load_timeout_s=settings.load_timeout_s, can_drop_loads=CAN_DROP_LOADS)


def register(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, kv_caches: dict[str, Any]
) -> CacheClient | None:
    """Give this rank's KV cache to the server, now or when it is there; None where it cannot be shared."""
    group, num_blocks = kv_cache_config.kv_cache_groups[0], kv_cache_config.num_blocks
    specs = layer_specs(group)
    client = CacheClient(settings.url, token=settings.token(), required=False)
    try:
        isa = ""
        if next(iter(kv_caches.values())).device.type == "cpu":
            isa = cpu_isa(vllm_config, next(iter(specs.values())))
            rehome_caches(vllm_config, kv_caches)
        client.register_kv_caches(
            kv_caches,
            engine_id=vllm_config.kv_transfer_config.engine_id,
            model=model_name(vllm_config, model_id=settings.model_id, engine=_engine(vllm_config, kv_caches)),
            format=choose_format(kv_caches, specs, num_blocks),
            rank=get_tensor_model_parallel_rank(),
            world_size=vllm_config.parallel_config.tensor_parallel_size,
            hints=hints_for(group.kv_cache_spec.block_size, num_blocks, isa=isa),
            policy=IPCPolicy(isolated_ipc=settings.isolated_ipc),
        )
    except KVFerryError as error:
        client.close()
        _LOG.error("KVferry neither stores nor reuses KV here: %s.", error)
        return None
    return client


def transfer_results() -> Any:
    """An empty KVConnectorTransferResults; only called by releases that have it."""
    return base.KVConnectorTransferResults()


def hit_source(name: str) -> Any:
    """The tier that vLLM's statistics name for our hits."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[name]


def warn_of_failure_policy(transfer: Any) -> None:
    """vLLM by default fails a request when a load of its KV fails."""
    if transfer.kv_load_failure_policy != "recompute" and transfer.is_kv_consumer:
        _LOG.warning(
            "kv_load_failure_policy is %r: a request whose KV cannot be loaded, e.g. because the server died, WILL "
            'FAIL. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config, so that its tokens are computed.',
            transfer.kv_load_failure_policy,
        )


def rehome_caches(vllm_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """Move KV caches of a CPU into memory that other processes can map.

    Layers may compute with other views of what is registered: all move together.
    """
    layers = vllm_config.compilation_config.static_forward_context
    views = [getattr(layers.get(name), "kv_cache", None) for name in kv_caches]
    rehome([*kv_caches.values(), *(view for view in views if isinstance(view, torch.Tensor))])


def _engine(vllm_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """What decides how a block is packed, as far as shapes do not show it."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend().get_name() for name in kv_caches if name in layers}
    release = ".".join(vllm.__version__.split(".")[:2])
    return f"{release}/{'+'.join(sorted(backends))}"


def cpu_isa(vllm_config: Any, spec: Any) -> str:
    """How vLLM's CPU kernels pack a block, which depends on the processor."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(dtype, spec.block_size, getattr(spec, "head_size", None), cache_dtype)
    return f"{platform.machine()}-{isa}"
