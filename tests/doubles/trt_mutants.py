"""Connectors that do what TensorRT-LLM does not allow, or what would break it; and an asynchronous one that may pass.

Made over the connector that is installed at the time, see `trt_interface.installed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvferry.connectors import trtllm
from kvferry.connectors.trtllm.plans import LoadPlan
from kvferry.errors import KVFerryError

Pair = tuple[Any, Any]


def answering(change: Callable[[Any, int, int], Any]) -> Pair:
    """Gives `change(request, local, promised)` in answer to a query."""

    class Scheduler(trtllm.KVFerryScheduler):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            promised, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return change(request, num_computed_tokens, promised)

    return Scheduler, trtllm.KVFerryWorker


def saving_too_early() -> Pair:
    """Saves all of a prompt's blocks after its first chunk."""

    class Scheduler(trtllm.KVFerryScheduler):
        def build_connector_meta(self, scheduler_output: Any) -> Any:
            for data in scheduler_output.new_requests:
                data.num_scheduled_tokens = len(data.new_tokens)
            return super().build_connector_meta(scheduler_output)

    return Scheduler, trtllm.KVFerryWorker


def saving_what_comes(num_tokens: int = 32) -> Pair:
    """Counts that many tokens as computed that are not: those of the next step."""

    class Scheduler(trtllm.KVFerryScheduler):
        def build_connector_meta(self, scheduler_output: Any) -> Any:
            for data in [*scheduler_output.new_requests, *scheduler_output.cached_requests]:
                data.computed_position += num_tokens
            return super().build_connector_meta(scheduler_output)

    return Scheduler, trtllm.KVFerryWorker


def giving_blocks_back() -> Pair:
    """Says of every request that nobody reads its blocks."""

    class Scheduler(trtllm.KVFerryScheduler):
        def request_finished(self, request: Any, cache_block_ids: Any) -> bool:
            super().request_finished(request, cache_block_ids)
            return False

    return Scheduler, trtllm.KVFerryWorker


def ending_saves_at_once() -> Pair:
    """Says that the blocks of a request are saved when it is told that the request has ended."""

    class Worker(trtllm.KVFerryWorker):
        def get_finished(self, finished_gen_req_ids: Any, started_loading_req_ids: Any) -> Any:
            super().get_finished(finished_gen_req_ids, started_loading_req_ids)
            return list(finished_gen_req_ids), []

    return trtllm.KVFerryScheduler, Worker


def returning_from_failed_loads() -> Pair:
    class Worker(trtllm.KVFerryWorker):
        def start_load_kv(self, stream: Any) -> None:
            with contextlib.suppress(KVFerryError):
                super().start_load_kv(stream)

    return trtllm.KVFerryScheduler, Worker


def dropping_overtaken_promises() -> Pair:
    """Where the engine has the beginning of a promise by now, leaves out the rest, too."""

    class Scheduler(trtllm.KVFerryScheduler):
        def cancel_load(self, request: Any, start: int, end: int) -> None:
            super().cancel_load(request, start, 1 << 30)

    return Scheduler, trtllm.KVFerryWorker


def not_loading() -> Pair:
    """Promises, and leaves the blocks as they are."""

    class Worker(trtllm.KVFerryWorker):
        def start_load_kv(self, stream: Any) -> None:
            self._side._loads = ()
            super().start_load_kv(stream)

    return trtllm.KVFerryScheduler, Worker


def repeating_plans() -> Pair:
    """Does all that the metadata says whenever it is asked."""

    class Worker(trtllm.KVFerryWorker):
        def start_load_kv(self, stream: Any) -> None:
            self.bind_connector_meta(self.get_connector_meta())
            super().start_load_kv(stream)

    return trtllm.KVFerryScheduler, Worker


def indexing_with_minus_one(last_block: int) -> Pair:
    """Takes a block without a page for the last one of the pool, as Python does, and fills it, too."""

    class Scheduler(trtllm.KVFerryScheduler):
        def build_connector_meta(self, scheduler_output: Any) -> Any:
            for data in scheduler_output.new_requests:
                data.new_block_ids = [block % (last_block + 1) for block in data.new_block_ids]
                data.new_block_ids_by_layer_group = [data.new_block_ids]
            return super().build_connector_meta(scheduler_output)

    return Scheduler, trtllm.KVFerryWorker


def ending_unknown_saves() -> Pair:
    class Worker(trtllm.KVFerryWorker):
        def get_finished(self, finished_gen_req_ids: Any, started_loading_req_ids: Any) -> Any:
            return [*super().get_finished(finished_gen_req_ids, started_loading_req_ids)[0], 999], []

    return trtllm.KVFerryScheduler, Worker


def unpicklable() -> Pair:
    class Scheduler(trtllm.KVFerryScheduler):
        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return lambda: None

    return Scheduler, trtllm.KVFerryWorker


def raising(method: str) -> Pair:
    """Fails in a method of the worker."""

    def fail(self: Any, *_: Any) -> None:
        raise OSError("it broke")

    return trtllm.KVFerryScheduler, type("Worker", (trtllm.KVFerryWorker,), {method: fail})


def asynchronous(*, steps: int, heeds_ends: bool) -> Pair:
    """Loads beside the engine's steps, `steps` of them late; `heeds_ends`: not once the request has ended."""
    ended: set[int] = set()  # what rank 0's scheduler could tell the workers by other ways

    class Scheduler(trtllm.KVFerryScheduler):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self._parked: list[LoadPlan] = []

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            promised, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return promised, promised > 0

        def update_state_after_alloc(self, request: Any, block_ids: Any) -> None:
            super().update_state_after_alloc(request, block_ids)
            state = self._side._states[request.request_id]
            if state.promise.lease_id:
                data = SimpleNamespace(request_id=request.request_id, computed_position=state.local_tokens)
                self._parked += self._side._load(data, state)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            plan = super().build_connector_meta(scheduler_output)
            loads, self._parked = tuple(self._parked), []
            return dataclasses.replace(plan, loads=loads)

        def request_finished(self, request: Any, cache_block_ids: Any) -> bool:
            ended.add(request.request_id)
            return super().request_finished(request, cache_block_ids)

    class Worker(trtllm.KVFerryWorker):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self._parked: list[list[Any]] = []

        def start_load_kv(self, stream: Any) -> None:
            self._parked += [[load, steps] for load in self._side._loads]
            self._side._loads = ()
            super().start_load_kv(stream)

        def get_finished(self, finished_gen_req_ids: Any, started_loading_req_ids: Any) -> Any:
            saved, _ = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
            loaded = []
            for parked in list(self._parked):
                parked[1] -= 1
                if parked[1] < 0:
                    self._parked.remove(parked)
                    if heeds_ends and parked[0].request_id in ended:
                        continue
                    self._side._loads = (parked[0],)
                    self._side.load(None)
                    loaded.append(parked[0].request_id)
            return saved, loaded

    return Scheduler, Worker
