"""A real SGLang engine, as commands. Its scheduler is a process of its own, or one a rank."""

from __future__ import annotations

import os
import time
from typing import Any

from sglang.srt.entrypoints.engine import Engine

ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "page_size": 16,
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "context_length": 2048,
    "disable_overlap_schedule": True,
    "log_level": "info",
    "enable_cache_report": True,
}


class EngineSide:
    """An engine whose main process is this one."""

    def __init__(self, model: str, **arguments: Any) -> None:
        if arguments.get("tp_size", 1) > 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
        self._engine = Engine(model_path=model, **(ON_CPU | arguments))

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **arguments: Any) -> dict[str, Any]:
        """Greedy tokens of prompts that come in together, what came out of which cache, and the time."""
        started = time.perf_counter()
        outputs = self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            **arguments,
        )
        meta = [output["meta_info"] for output in outputs]
        return {
            "tokens": [output["output_ids"] for output in outputs],
            "cached": [one["cached_tokens"] for one in meta],
            "details": [one.get("cached_tokens_details") for one in meta],
            "reasons": [one["finish_reason"] for one in meta],
            "seconds": time.perf_counter() - started,
        }

    def flush(self) -> dict[str, Any]:
        """Empty the engine's own caches."""
        deadline = time.monotonic() + 20
        while not self._engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise TimeoutError("the engine's caches are in use")
            time.sleep(0.05)
        return {}

    def close(self) -> None:
        self._engine.shutdown()
