"""The main job, shown: one engine's KV cache outlives it in a cache server and is reused by another engine.

Four processes: this one, the cache server, engine A (computes a prompt, stores its KV, is killed) and engine B (reuses
it). What must hold is checked, not assumed: B's tokens with reuse equal B's tokens without, bit for bit, and with
another prompt's KV in place they do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

from kvferry.cli.children import ServerProcess
from kvferry.cli.machine import resolve_device, wrapper_kind
from kvferry.cli.memory_back import find_held, measure_memory_back
from kvferry.reference import EngineConfig, EngineProcess, ModelConfig, PagedConfig
from kvferry.reference.worker import Generate, Init, Prefill, Store

__all__ = ["DemoConfig", "DemoResult", "Say", "run_demo"]

HOST_MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_size=1024)
CUDA_MODEL = ModelConfig(num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=5632)

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """What the demo runs. Sizes of 0 mean: as suits the device. `timeout_s` bounds each step."""

    device: str = "auto"
    prompt_tokens: int = 0
    new_tokens: int = 24
    cache_tokens: int = 0
    timeout_s: float = 60.0
    seed: int = 1

    def resolved(self) -> DemoConfig:
        """With the device that this machine has, and sizes under which prefill takes long enough to see."""
        device = resolve_device(self.device)
        prompt, cache = (8200, 32768) if device == "cuda" else (2100, 12288)
        prompt = self.prompt_tokens or prompt
        return dataclasses.replace(
            self, device=device, prompt_tokens=prompt, cache_tokens=self.cache_tokens or max(cache, 3 * prompt)
        )

    def engine(self) -> EngineConfig:
        model = CUDA_MODEL if self.device == "cuda" else HOST_MODEL
        paged = PagedConfig(num_blocks=-(-(self.cache_tokens + self.new_tokens) // 16))
        return EngineConfig(model=model, paged=paged, device=self.device, timeout_s=self.timeout_s)

    def prompts(self) -> tuple[list[int], list[int]]:
        """The prompt, and another one of the same length."""
        source = random.Random(self.seed)
        vocabulary = self.engine().model.vocab_size
        first, second = ([source.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(2))
        return first, second


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What was measured; `memory_back_ms` is None where A's memory did not come back in time."""

    tokens_equal: bool
    control_equal: bool
    reused_tokens: int
    control_reused_tokens: int
    prompt_tokens: int
    ttft_cold_ms: float
    ttft_reused_ms: float
    engine_a_prefill_ms: float
    engine_a_store_ms: float
    memory_back_ms: float | None
    memory_back_bytes: int
    memory_back_seen: str
    backend: str
    wrapper: str
    tokens_reused: list[int]
    tokens_cold: list[int]
    tokens_control: list[int]
    seconds: float

    def broken_promises(self) -> list[str]:
        """What did not hold, in words; empty where all did."""
        checks = {
            "tokens with reuse differ from tokens without": not self.tokens_equal,
            "another prompt's KV gave the same tokens, so the comparison shows nothing": self.control_equal,
            "no token was reused": self.reused_tokens == 0,
            "the control reused no token, so it shows nothing": self.control_reused_tokens == 0,
            "engine A's memory did not come back after it was killed": self.memory_back_ms is None,
        }
        return [text for text, broken in checks.items() if broken]


def run_demo(config: DemoConfig, say: Say) -> DemoResult:
    """Run it all; `say` is told each step as it begins. All children have ended when this returns or raises."""
    started = time.monotonic()
    config = config.resolved()
    prompt, other = config.prompts()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-"))
        say("starting the cache server and engine A")
        engine_a = stack.enter_context(EngineProcess("A"))
        socket = pathlib.Path(folder) / "server.sock"
        server = stack.enter_context(ServerProcess(socket, _pool_bytes(config), config.device, config.timeout_s))
        first = _run_engine_a(config, engine_a, server, prompt, say)
        second = _run_engine_b(config, server.url, prompt, other, say)
    return DemoResult(
        **first,
        **second,
        prompt_tokens=config.prompt_tokens,
        backend="cuda" if config.device == "cuda" else "host",
        seconds=time.monotonic() - started,
    )


def _run_engine_a(
    config: DemoConfig, engine: EngineProcess, server: ServerProcess, prompt: list[int], say: Say
) -> dict[str, Any]:
    """Engine A's life and death, as fields of the result."""
    say("engine A: loading the model, registering its KV cache")
    ready = engine.call(Init(engine=config.engine(), engine_id="A", server=server.url), config.timeout_s)
    say(f"engine A: computing {len(prompt)} tokens")
    prefill = engine.call(Prefill(tokens=prompt), config.timeout_s)
    say("engine A: storing their KV")
    store = engine.call(Store(request=prefill["request"]), config.timeout_s)
    say("engine A: SIGKILL")
    held = find_held(config.device, (engine.pid, server.pid), ready["device_bytes"])
    back = measure_memory_back(held, engine.send_kill)
    engine.kill()
    return {
        "engine_a_prefill_ms": prefill["ms"],
        "engine_a_store_ms": store["ms"],
        "wrapper": wrapper_kind(config.device),
        "memory_back_ms": back.ms,
        "memory_back_bytes": back.num_bytes,
        "memory_back_seen": back.seen,
    }


def _run_engine_b(config: DemoConfig, url: str, prompt: list[int], other: list[int], say: Say) -> dict[str, Any]:
    """Engine B's three answers, as fields of the result: with reuse, without, and with the wrong KV.

    Computing, storing and reusing the other prompt first warms every path, so that the timed ones meet equal
    conditions; and it puts the KV that the control takes by the same way as any.
    """
    with EngineProcess("B") as engine:

        def generate(tokens: list[int], **options: Any) -> dict[str, Any]:
            command = Generate(tokens=tokens, max_new_tokens=config.new_tokens, **options)
            return engine.call(command, config.timeout_s)

        say("engine B: loading the model, registering its KV cache")
        engine.call(Init(engine=config.engine(), engine_id="B", server=url), config.timeout_s)
        say("engine B: warming up on another prompt")
        generate(other, store=True)
        generate(other, reuse=True)
        say("engine B: the prompt, reusing what A left")
        reused = generate(prompt, reuse=True)
        say("engine B: the prompt, computing everything")
        cold = generate(prompt)
        say("engine B: the prompt with the other prompt's KV, as a control")
        control = generate(prompt, reuse=True, kv_of=other)
    return {
        "tokens_equal": reused["tokens"] == cold["tokens"],
        "control_equal": control["tokens"] == cold["tokens"],
        "reused_tokens": reused["reused_tokens"],
        "control_reused_tokens": control["reused_tokens"],
        "ttft_cold_ms": cold["ttft_ms"],
        "ttft_reused_ms": reused["ttft_ms"],
        "tokens_reused": reused["tokens"],
        "tokens_cold": cold["tokens"],
        "tokens_control": control["tokens"],
    }


def _pool_bytes(config: DemoConfig) -> int:
    """Room in the server for both prompts, and half as much again."""
    return 3 * config.prompt_tokens * config.engine().token_bytes + (64 << 20)
