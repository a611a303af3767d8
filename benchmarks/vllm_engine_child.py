"""One vLLM engine with KVferry's connector, for benchmarks/vllm_reuse.py: a JSON object a line in, one out."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import time
import traceback
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the connector's two sides can be watched from here

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvferry.client import Job

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
TINY = {**LLAMA_8B, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "torch_dtype": "float32", "bos_token_id": 1}


def write_model(folder: pathlib.Path, *, tiny: bool) -> int:
    """A model's folder; the number of its tokens. The tiny one has weights, which vLLM packs anew for a CPU."""
    config = TINY if tiny else LLAMA_8B
    if folder.exists():
        return int(config["vocab_size"])
    folder.mkdir()
    if tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**TINY))
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0.0, 1.5 / weight.shape[-1] ** 0.5)
        model.save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps(config))
    return int(config["vocab_size"])


def scale_weights(model: torch.nn.Module) -> int:
    """Give random weights a scale at which tokens depend on the KV; vLLM's dummy weights are too small for that."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0 if "norm" in name else 0.0)
                continue
            generator = torch.Generator(device=weight.device)
            generator.manual_seed(1234 + number)
            weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)
            if "qkv" in name:
                weight[: weight.shape[0] * 5 // 6].mul_(1.7)  # sharper attention
    return sum(weight.numel() for weight in model.parameters())


class EngineChild:
    """The engine, and what is measured around it."""

    def __init__(self, url: str, folder: str, cpu: bool) -> None:
        self._vocab = write_model(pathlib.Path(folder), tiny=cpu)
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url},
        }
        small: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 128 << 20} if cpu else {}
        self._llm = LLM(
            folder,
            load_format="auto" if cpu else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32" if cpu else "bfloat16",
            max_model_len=16384,
            num_gpu_blocks_override=None if cpu else 131072 // 16,
            kv_transfer_config=connector,
            **small,
        )
        self._num_weights = 0 if cpu else self._llm.apply_model(scale_weights)[0]
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._sides = self._scheduler.connector._scheduler, get_kv_transfer_group()._worker
        self._asked_s = self._lookup_s = self._load_s = self._copy_s = self._told_server_s = 0.0
        self._store_as: array.array[int] | None = None
        self._watch()

    def info(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name(0),
            "weights": self._num_weights,
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "registered": self._sides[1]._client is not None,
        }

    def generate(self, seed: int, length: int, tokens: int, cache_salt: str | None = None) -> dict[str, Any]:
        """Greedy tokens; times of this request alone."""
        self._asked_s = self._lookup_s = self._load_s = self._copy_s = 0.0
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt: dict[str, Any] = {"prompt_token_ids": self._prompt(seed, length)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        engine, first, steps, output = self._llm.llm_engine, 0.0, 0, None
        started = time.perf_counter()
        engine.add_request(f"{seed}-{started}", prompt, params)
        while engine.has_unfinished_requests():
            steps += 1
            for done in engine.step():
                output, first = done, first or time.perf_counter()
        assert output is not None
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "ms": (time.perf_counter() - started) * 1e3,
            "ttft_ms": (first - started) * 1e3,
            "lookup_ms": self._lookup_s * 1e3,
            "load_ms": self._load_s * 1e3,
            "copy_ms": self._copy_s * 1e3,
            "steps": steps,
        }

    def store_as(self, seed: int | None, length: int) -> dict[str, Any]:
        """From now on store what is computed under the keys of another prompt: the control."""
        self._store_as = None if seed is None else array.array("i", self._prompt(seed, length))
        return {}

    def settle(self) -> dict[str, Any]:
        """Step until all stores have ended."""
        while self._scheduler.has_requests():
            self._llm.llm_engine.engine_core.get_output()
        return {"stores_left": len(self._sides[0].jobs)}

    def shuffle(self) -> dict[str, Any]:
        """Free blocks in random order, as after hours of service: neighbours would make larger copies."""
        queue = self._scheduler.kv_cache_manager.block_pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        random.Random(len(blocks)).shuffle(blocks)
        queue.append_n(blocks)
        return {"blocks": len(blocks)}

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

    def _prompt(self, seed: int, length: int) -> list[int]:
        source = random.Random(f"{seed} {length}")  # no prompt is the beginning of another
        return [source.randrange(5, self._vocab - 5) for _ in range(length)]

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

        Job.end = end  # type: ignore[method-assign]


def main() -> None:
    """Answer until stdin ends; what fails is an answer, too."""
    child = EngineChild(**json.loads(sys.argv[1]))
    answer(child.info())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            found = getattr(child, command.pop("op"))(**command)
        except Exception as error:  # noqa: BLE001 - whatever it was, the other side has to know
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answer(found)


def answer(found: dict[str, Any]) -> None:
    print(f"ANSWER {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
