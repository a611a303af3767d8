"""TensorRT-LLM's view of the connector: each hook is handed on to the scheduler's or the worker's side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvferry.client import CacheClient
from kvferry.connectors.trtllm import interface
from kvferry.connectors.trtllm.caches import Pool, device_memory, pool_of_regions, pool_of_tensor
from kvferry.connectors.trtllm.identity import model_name
from kvferry.connectors.trtllm.model import read_config, shape_of
from kvferry.connectors.trtllm.plans import StepPlan
from kvferry.connectors.trtllm.promises import Promises
from kvferry.connectors.trtllm.refusals import UNSHARED, check_configuration
from kvferry.connectors.trtllm.scheduler import SchedulerRules, SchedulerSide
from kvferry.connectors.trtllm.settings import read_settings
from kvferry.connectors.trtllm.worker import WorkerSide
from kvferry.errors import DeadlineError, KVFerryError, LayoutError, UnsupportedMemoryError
from kvferry.ipc import IPCPolicy
from kvferry.layout import chunk_tokens_for

_LOG = logging.getLogger("kvferry.trtllm")
# `object` where TensorRT-LLM is absent: it takes any class that has the methods.
_SchedulerBase: Any = interface.base_class("KvCacheConnectorScheduler")
_WorkerBase: Any = interface.base_class("KvCacheConnectorWorker")


class KVFerryScheduler(_SchedulerBase):  # type: ignore[misc]
    """Rank 0's: asks the cache server, and plans. A set-up that cannot be served raises ValueError at the start.

    Without a server, or with one that fails, requests are computed. One that was promised KV which then cannot be
    loaded ends the engine: see `KVFerryWorker`.
    """

    def __init__(self, llm_args: Any) -> None:
        if _SchedulerBase is not object:
            super().__init__(llm_args)
        check_configuration(llm_args)
        settings = read_settings(llm_args)
        block_size = int(llm_args.kv_cache_config.tokens_per_block)
        client = CacheClient(settings.url, timeout_s=settings.lookup_timeout_s, token=settings.token(), required=False)
        promises = Promises(client, interface.own_engine_id(llm_args), disk_wait_s=settings.disk_wait_s)
        self._args = llm_args  # keeps its id, which is part of the engine's
        self._side = SchedulerSide(SchedulerRules(block_size, chunk_tokens_for(block_size)), promises)

    def wait_for_initialization(self) -> None:
        """Nothing: what is not there yet is a miss."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._side.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self._side.allocated(request.request_id, block_ids)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        self._side.allocated(request.request_id, _only(block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Raised here, an error would end this rank, and leave the others waiting for what it has to tell them."""
        try:
            return self._side.plan(scheduler_output)
        except KVFerryError as error:
            return StepPlan(broken=str(error))

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        return self._side.finished(request.request_id)

    def request_finished_by_layer_group(self, request: Any, cache_block_ids: Sequence[Sequence[int]]) -> bool:
        return self._side.finished(request.request_id)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self._side.cancel_load(request.request_id, start, end)

    def request_reset(self, request: Any) -> None:
        self._side.reset(request.request_id)

    def shutdown(self) -> None:
        """Hang up. Idempotent; TensorRT-LLM ends its processes instead, which does the same."""
        self._side.close()


class KVFerryWorker(_WorkerBase):  # type: ignore[misc]
    """Each rank's: shares the KV pool with the cache server, loads and stores blocks of it.

    Loads are done when `start_load_kv` returns. One that fails raises there, which ends the engine: its blocks were
    promised, and TensorRT-LLM would compute with whatever lies in them. No load is ever asynchronous, since nobody
    would tell of a request that is cancelled meanwhile, and its blocks are given away at once.
    """

    memory_at = staticmethod(device_memory)

    def __init__(self, llm_args: Any) -> None:
        if _WorkerBase is not object:
            super().__init__(llm_args)
        check_configuration(llm_args)
        self._args = llm_args
        self._settings = read_settings(llm_args)
        self._client = CacheClient(self._settings.url, token=self._settings.token(), required=False)
        self._side = WorkerSide(
            self._client,
            load_timeout_s=self._settings.load_timeout_s,
            copies_blocks=bool(getattr(llm_args.kv_cache_config, "enable_partial_reuse", True)),
        )
        self._plan: object = None
        self._stream: int | None = None  # that of the forwards, which is not always the one that hooks are given

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._register(lambda shape: pool_of_tensor(kv_cache_tensor, self._args, shape))

    def register_kv_cache_layout(self, layout: Any) -> None:
        self._register(lambda shape: pool_of_regions(layout, self._args, shape, self.memory_at))

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """What is called after each forward, on its stream."""
        return self._note_stream

    def bind_connector_meta(self, metadata: object) -> None:
        self._plan = metadata
        if isinstance(metadata, StepPlan):
            self._side.bind(metadata)

    def get_connector_meta(self) -> object:
        return self._plan

    def start_load_kv(self, stream: Any) -> None:
        self._side.load(self._stream or interface.stream_handle(stream))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing is loaded during a forward."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Stores begin after the forward: a replayed CUDA graph would skip this."""

    def wait_for_save(self, stream: Any) -> None:
        self._side.store(self._stream or interface.stream_handle(stream))

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        return self._side.finished(finished_gen_req_ids), []

    def shutdown(self) -> None:
        """Hang up. Idempotent; TensorRT-LLM ends its processes instead, which does the same."""
        self._side.close()

    def _note_stream(self) -> None:
        self._stream = interface.current_stream()

    def _register(self, make: Callable[[Any], Pool]) -> None:
        """Give the pool to the server, now or when it is there. All ranks are here at one time."""
        rank, size = interface.rank_and_size()
        said = int(getattr(self._args, "tensor_parallel_size", 1) or 1)
        engine_id = interface.shared_engine_id(self._args, size)
        if size != said:
            raise LayoutError(f"{size} ranks, but tensor_parallel_size is {said}: not only tensor parallelism")
        revision = str(getattr(self._args, "revision", None) or "")
        config = read_config(str(self._args.model), revision)
        pool = make(shape_of(config))
        settings = self._settings
        model = model_name(
            self._args, config, model_id=settings.model_id, release=interface.release(), engine_id=engine_id
        )
        try:
            self._client.register_kv_caches(
                pool.tensors,
                engine_id=engine_id,
                model=model,
                format=pool.format,
                rank=rank,
                world_size=size,
                hints=pool.hints,
                policy=IPCPolicy(isolated_ipc=settings.isolated_ipc),
            )
        except UnsupportedMemoryError as error:
            raise UnsupportedMemoryError(f"TensorRT-LLM's KV pool cannot be shared: {error}. {UNSHARED}") from error
        except DeadlineError as error:
            _LOG.warning("the cache server at %s hangs: this engine keeps and finds no KV: %s", settings.url, error)


def _only(block_ids: Sequence[Sequence[int]]) -> Sequence[int]:
    """The pages of the one layer group there is; none where they are gone already."""
    if len(block_ids) > 1:
        raise LayoutError(f"pages of {len(block_ids)} layer groups; one is supported")
    return block_ids[0] if block_ids else ()
