"""A real vLLM engine, as commands. It steps only when told to, so that a test decides what happens in between."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import RequestOutputKind

from kvferry.connectors.vllm.p2p import scheduler as p2p_scheduler

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}


class EngineSide:
    """An engine in this process; tensor-parallel ranks are processes of their own."""

    def __init__(self, model: str, connector: dict[str, Any] | None = None, **arguments: Any) -> None:
        ranks = arguments.get("tensor_parallel_size", 1)
        if ranks > 1:  # which vLLM would not bind to processors by itself on a machine with one memory node
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        if connector is not None:
            arguments["kv_transfer_config"] = connector
        if arguments.get("async_scheduling"):
            _allow_asynchronous_scheduling()
        defaults: dict[str, Any] = {
            "dtype": "float32",  # bfloat16 is not the same from batch to batch
            "block_size": 32,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
        }
        self._llm = LLM(model=model, **(defaults | arguments))
        self._engine = self._llm.llm_engine
        self._outputs: dict[str, Any] = {}
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._preempted: set[str] = set()
        self._counts: Counter[str] = Counter()
        if (
            ranks == 1
            and connector is not None
            and connector["kv_connector"] in ("KVFerryConnector", "P2pNcclConnector")
        ):
            for side in (get_kv_transfer_group()._worker, self._scheduler.connector._scheduler):
                if side is not None:
                    self._keep_counts(side.counters)
        self._number = 0

    def _keep_counts(self, counters: Any) -> None:
        """vLLM takes them at every step, and drops them where its statistics are off."""
        take = counters.take

        def taken() -> dict[str, float]:
            found = take()
            self._counts.update(found)
            return dict(found)

        counters.take = taken

    def version(self) -> dict[str, Any]:
        return {"version": vllm.__version__}

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **prompt: Any) -> dict[str, Any]:
        """Greedy tokens of prompts that come in together, and what came out of caches."""
        ids = self.submit(prompts, max_tokens, **prompt)["ids"]
        self.run()
        return self.results(ids)

    def submit(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        lora: list[Any] | None = None,
        sampling: dict[str, Any] | None = None,
        priorities: list[int] | None = None,
        names: list[str] | None = None,
        **prompt: Any,
    ) -> dict[str, Any]:
        """Let requests come in, maybe with an adapter (name, number, path); `run` or `step` works on them."""
        adapter = None if lora is None else LoRARequest(*lora)
        ids = []
        for index, (tokens, priority) in enumerate(zip(prompts, priorities or [0] * len(prompts), strict=True)):
            self._number += 1
            name = names[index] if names else f"r{self._number}"
            params = SamplingParams(max_tokens=max_tokens, **(GREEDY | (sampling or {})))
            if params.n > 1:  # else each answer's tokens come in an output of its own
                params.output_kind = RequestOutputKind.FINAL_ONLY
            self._started[name] = time.perf_counter()
            self._engine.add_request(
                name, {"prompt_token_ids": tokens, **prompt}, params, lora_request=adapter, priority=priority
            )
            ids.append(name)
        return {"ids": ids}

    def step(self, count: int = 1) -> dict[str, Any]:
        """So many steps of the engine, as long as there is something to do."""
        for _ in range(count):
            if not self._engine.has_unfinished_requests():
                break
            outputs = self._engine.step()
            self._preempted |= {name for name, request in self._scheduler.requests.items() if request.num_preemptions}
            for output in outputs:
                if output.outputs[0].token_ids:
                    self._first.setdefault(output.request_id, time.perf_counter())
                self._outputs[output.request_id] = output
        return {"unfinished": self._engine.get_num_unfinished_requests()}

    def run(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Step until all requests have ended; whether they have."""
        deadline = time.monotonic() + timeout_s
        while self._engine.has_unfinished_requests() and time.monotonic() < deadline:
            self.step()
        return {"done": not self._engine.has_unfinished_requests()}

    def abort(self, ids: list[str]) -> None:
        self._engine.abort_request(ids)

    def results(self, ids: list[str]) -> dict[str, Any]:
        found = [self._outputs[name] for name in ids]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in found],
            "all_tokens": [[list(one.token_ids) for one in output.outputs] for output in found],
            "reasons": [output.outputs[0].finish_reason for output in found],
            "cached": [output.num_cached_tokens or 0 for output in found],
            "params": [output.kv_transfer_params for output in found],
            "ttft_ms": [(self._first[name] - self._started[name]) * 1e3 for name in ids if name in self._first],
        }

    def blocks(self) -> dict[str, Any]:
        """How many blocks are free, of how many."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "all": pool.num_gpu_blocks - 1}

    def asynchronous(self) -> dict[str, Any]:
        """Whether a step is scheduled before the one before has ended."""
        return {"is": self._engine.engine_core.engine_core.batch_queue is not None}

    def preemptions(self) -> dict[str, Any]:
        """How many requests were preempted so far, as seen after each step."""
        return {"count": len(self._preempted)}

    def metrics(self) -> dict[str, Any]:
        """The connector's counters, as vLLM's Prometheus endpoint has them."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return {"metrics": {name: value for name, value in found.items() if "kvferry" in name}}

    def reset_cache(self) -> dict[str, Any]:
        return {"done": self._scheduler.reset_prefix_cache(reset_connector=True)}

    def settle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Step as long as the connector asks for it, as an engine in a process of its own does."""
        deadline = time.monotonic() + timeout_s
        while self._scheduler.has_requests() and time.monotonic() < deadline:
            self._engine.engine_core.get_output()
        return {"done": not self._scheduler.has_requests()}

    def freeze_at_load(self, pid: int, count: int) -> None:
        """Stop the process `pid` once so many loads are to begin, before it can hear of any."""
        worker = get_kv_transfer_group()._worker
        start_loads, plans = worker.start_loads, []

        def freeze_first(plan: Any) -> None:
            plans.append(plan)
            if sum(len(one.loads) for one in plans) == count:
                worker.start_loads = start_loads
                os.kill(pid, signal.SIGSTOP)
                for one in plans:
                    start_loads(one)

        worker.start_loads = freeze_first

    def sleep(self) -> None:
        """What vLLM 0.33 calls before it takes KV memory away."""
        get_kv_transfer_group().unregister_kv_caches()

    def wake(self) -> None:
        """What it calls once the memory is there again; nothing of the old content is."""
        connector = get_kv_transfer_group()
        for cache in connector._kv_caches.values():
            cache.zero_()
        connector.restore_kv_caches()

    def load_time(self) -> dict[str, Any]:
        """The mean time of a load since the start."""
        return {"ms": self._counts["load_seconds"] / self._counts["loads"] * 1e3}

    def counts(self) -> dict[str, Any]:
        """What the connector has counted since the start."""
        return {"counts": dict(self._counts)}

    def addresses(self) -> dict[str, Any]:
        """Where the ranks of a P2pNcclConnector are reached, be it alone or a child of a MultiConnector."""
        connector = self._scheduler.connector
        children = [child._scheduler for child in getattr(connector, "_connectors", [connector])]
        return {"addresses": next(child.own_addresses for child in children if hasattr(child, "own_addresses"))}

    def take_any_kv(self) -> None:
        """For controls: let KV of another prompt come under a transfer's id."""
        module: Any = p2p_scheduler
        module.tag_of = lambda request: b""

    def receiving(self) -> dict[str, Any]:
        """How many transfers a P2pNcclConnector waits for."""
        return {"count": len(get_kv_transfer_group()._worker._receives)}

    def loading(self) -> dict[str, Any]:
        """How many loads have not ended."""
        return {"count": len(get_kv_transfer_group()._worker._loads)}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler


def _allow_asynchronous_scheduling() -> None:
    """vLLM's default on GPUs, which works on CPUs, too, but is switched off there."""
    check = CpuPlatform.check_and_update_config

    def check_and_allow(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_allow)
