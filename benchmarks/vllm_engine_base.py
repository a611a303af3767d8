"""What the engines of benchmarks/vllm_*.py have in common: a model, an engine in this process, lines that ask it.

Import it before vLLM: it keeps the engine's core in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a connector's two sides can be watched from here

import torch
import vllm
from vllm import LLM, SamplingParams

PR_SET_PDEATHSIG = 1
LLAMA_8B: dict[str, Any] = {
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
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "torch_dtype": "float32", "bos_token_id": 1}


def write_model(folder: pathlib.Path, *, tiny: bool) -> None:
    """A model's folder, unless it is there. The tiny one has weights, which vLLM packs anew for a CPU."""
    if folder.exists():
        return
    made = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    if tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**TINY))
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0.0, 1.5 / weight.shape[-1] ** 0.5)
        model.save_pretrained(made)
    else:
        (made / "config.json").write_text(json.dumps(LLAMA_8B))
    with contextlib.suppress(OSError):  # another engine was faster
        made.rename(folder)


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
    """An engine with a connector. Its methods are asked for by name, see `serve`."""

    def __init__(self, folder: str, cpu: bool, connector: dict[str, Any], **arguments: Any) -> None:
        write_model(pathlib.Path(folder), tiny=cpu)
        self._vocab = int((TINY if cpu else LLAMA_8B)["vocab_size"])
        small: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 128 << 20}
        self._llm = LLM(
            folder,
            load_format="auto" if cpu else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32" if cpu else "bfloat16",
            max_model_len=16384,
            kv_transfer_config=connector,
            **(small if cpu else arguments),
        )
        self._num_weights = 0 if cpu else self._llm.apply_model(scale_weights)[0]
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler

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
        }

    def generate(self, seed: int, length: int, tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy tokens of a prompt, and times of this request alone; those that end in `_s` are monotonic clocks'."""
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=more.pop("extra_args", None)
        )
        prompt = {"prompt_token_ids": self._prompt(seed, length), **more}
        engine, first, steps, output = self._llm.llm_engine, 0.0, 0, None
        started = time.monotonic()
        engine.add_request(f"{seed}-{started}", prompt, params)
        while engine.has_unfinished_requests():
            steps += 1
            for done in engine.step():
                output, first = done, first or time.monotonic()
        ended = time.monotonic()
        assert output is not None
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "ms": (ended - started) * 1e3,
            "ttft_ms": (first - started) * 1e3,
            "steps": steps,
            "params": output.kv_transfer_params,
            "started_s": started,
            "first_s": first,
        }

    def settle(self, most_s: float = 20.0) -> dict[str, Any]:
        """Step as long as the connector has something to do."""
        until = time.monotonic() + most_s
        while self._scheduler.has_requests() and time.monotonic() < until:
            self._llm.llm_engine.engine_core.get_output()
        return {"settled": not self._scheduler.has_requests()}

    def arrange(self, seed: int | None) -> dict[str, Any]:
        """Free blocks in random order, as after hours of service (neighbours make larger copies); None: as when new."""
        queue = self._scheduler.kv_cache_manager.block_pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        blocks.sort(key=lambda block: block.block_id)
        if seed is not None:
            random.Random(seed).shuffle(blocks)
        queue.append_n(blocks)
        return {"blocks": len(blocks)}

    def _prompt(self, seed: int, length: int) -> list[int]:
        source = random.Random(f"{seed} {length}")  # no prompt is the beginning of another
        return [source.randrange(5, self._vocab - 5) for _ in range(length)]


def serve(make: Callable[..., EngineChild]) -> None:
    """Make the engine that the first argument describes; answer until stdin ends. What fails is an answer, too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where it hangs it ends with who asks
    child = make(**json.loads(sys.argv[1]))
    answer(json.dumps(child.info()))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(json.dumps(getattr(child, command.pop("op"))(**command)))
        except Exception as error:  # noqa: BLE001 - whatever it was, the other side has to know
            traceback.print_exc()
            answer(json.dumps({"error": f"{type(error).__name__}: {error}"}))


def answer(text: str) -> None:
    print(f"ANSWER {text}", flush=True)
