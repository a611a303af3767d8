"""One vLLM engine with KVferry's connector, for benchmarks/vllm_reuse.py: a JSON object a line in, one out."""

from __future__ import annotations

import array
import dataclasses
import statistics
import time
from typing import Any

import torch
from vllm_engine_base import EngineChild, serve

from kvferry.client import Job


class ReuseChild(EngineChild):
    """The engine, and what is measured around it."""

    def __init__(self, url: str, folder: str, cpu: bool) -> None:
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url},
        }
        super().__init__(folder, cpu, connector, num_gpu_blocks_override=131072 // 16)
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._sides = self._scheduler.connector._scheduler, get_kv_transfer_group()._worker
        self._asked_s = self._lookup_s = self._load_s = self._copy_s = self._told_server_s = 0.0
        self._store_as: array.array[int] | None = None
        self._watch()

    def info(self) -> dict[str, Any]:
        return {**super().info(), "registered": self._sides[1]._client is not None}

    def generate(self, seed: int, length: int, tokens: int, **more: Any) -> dict[str, Any]:
        self._asked_s = self._lookup_s = self._load_s = self._copy_s = 0.0
        return {
            **super().generate(seed, length, tokens, **more),
            "lookup_ms": self._lookup_s * 1e3,
            "load_ms": self._load_s * 1e3,
            "copy_ms": self._copy_s * 1e3,
        }

    def store_as(self, seed: int | None, length: int) -> dict[str, Any]:
        """From now on store what is computed under the keys of another prompt: the control."""
        self._store_as = None if seed is None else array.array("i", self._prompt(seed, length))
        return {}

    def settle(self, most_s: float = 20.0) -> dict[str, Any]:
        """Step until all stores have ended."""
        super().settle(most_s)
        return {"stores_left": len(self._sides[0].jobs)}

    def plain_copy(self) -> dict[str, Any]:
        """The time of one plain copy from pinned memory to the GPU of 1 GiB, an 8k prompt's KV."""
        if not torch.cuda.is_available():
            return {"ms": 0.0}
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device="cuda")
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
        return {"ms": statistics.median(times[1:])}

    def _watch(self) -> None:
        """Time lookups and loads, and let stores go under other keys."""
        scheduler, worker = self._sides
        matched, start_loads, start_stores = scheduler.matched, worker.start_loads, worker.start_stores
        take_received = worker.take_received

        def timed_matched(*args: Any) -> Any:
            self._asked_s = self._asked_s or time.perf_counter()
            found = matched(*args)
            if found[0] is not None and not self._lookup_s:  # None: vLLM is to ask again
                self._lookup_s = time.perf_counter() - self._asked_s
            return found

        def loads(plan: Any) -> None:
            if plan.loads:
                self._told_server_s = time.perf_counter()
            start_loads(plan)

        def stores(plan: Any) -> None:
            if self._store_as is not None:
                renamed = [
                    dataclasses.replace(store, tokens=self._store_as[: len(store.tokens) // 4].tobytes())
                    for store in plan.stores
                ]
                plan = dataclasses.replace(plan, stores=tuple(renamed))
            start_stores(plan)

        def received() -> Any:
            found = take_received()
            if found:
                self._load_s += time.perf_counter() - self._told_server_s
            return found

        scheduler.matched = timed_matched
        worker.start_loads, worker.start_stores, worker.take_received = loads, stores, received
        self._watch_answers()

    def _watch_answers(self) -> None:
        """Note when the server's answer to a load comes, on the client's thread."""
        end_job = Job.end

        def end(job: Any, answer: Any) -> None:
            if type(answer).__name__ == "Retrieved":
                self._copy_s = time.perf_counter() - self._told_server_s
            end_job(job, answer)

        Job.end = end  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    serve(ReuseChild)
