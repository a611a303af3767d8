"""Requests of a `FakeTrtExecutor`, and how it is set up."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from doubles.trt_blocks import Hashes, PoolShape, chain


class State(enum.Enum):
    WAITING = "waiting"  # in the queue
    LOADING = "loading"  # parked until its asynchronous load has ended
    CONTEXT = "context"
    GENERATION = "generation"
    SAVING = "saving"  # ended, its blocks kept until all ranks have saved them
    ENDED = "ended"
    FAILED = "failed"


@dataclass(eq=False)
class Request:
    """One request, with the attributes that TensorRT-LLM's own has; `tokens` is what its host side knows so far."""

    request_id: int
    prompt: list[int]
    max_new: int = 4
    lora_task_id: int | None = None
    cache_salt_id: int | None = None
    multimodal_hashes: list[Any] | None = None
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # on the device already
    blocks: list[int] = field(default_factory=list)
    told_blocks: int = 0
    told_tokens: int = 0
    local: int = 0
    promised: int = 0
    matched: int = 0
    position: int = 0  # of the context
    chunk: int = 0
    asked: bool = False
    asked_at: int = 0  # what was here then
    offered: int = 0  # in answer
    wait: int = 0
    is_new: bool = True
    loaded: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def variant(self) -> str:
        """What, beside tokens, its KV depends on. A salt keeps requests apart, and changes no KV."""
        return f"{self.lora_task_id} {self.multimodal_hashes}"

    @property
    def scope(self) -> str:
        """What the engine's own reuse goes by."""
        return f"{self.variant} {self.cache_salt_id}"

    @property
    def sequence(self) -> list[int]:
        """All tokens that there are, also those that the host has not seen."""
        return self.prompt + self.sampled

    @property
    def hashes(self) -> Hashes:
        return chain(self.sequence, self.variant)

    def begin_anew(self) -> None:
        """Its allocation is gone: what was generated counts as prompt."""
        self.prompt, self.max_new = list(self.tokens), self.max_new - (len(self.tokens) - len(self.prompt))
        self.sampled, self.blocks = [], []
        self.told_blocks = self.told_tokens = self.local = self.promised = self.matched = self.position = 0
        self.asked, self.is_new, self.loaded, self.state = False, True, False, State.WAITING
        self.wait = 0


@dataclass(frozen=True)
class Setup:
    """How the executor runs. `holes` blocks at the start of a hit have no page, as if a window had passed them."""

    shape: PoolShape = field(default_factory=PoolShape)
    num_ranks: int = 1
    max_tokens: int = 8192  # computed in one step
    overlap: bool = False
    keeps: bool = True
    partial: bool = False
    graphs: bool = False
    v2: bool = False
    grows: bool = False  # V2 of later pre-releases: makes room for all that was promised, whatever the chunk
    waits: int = 0  # V2 of some pre-releases: steps between the query for a request and its first
    window: int | None = None
    holes: int = 0
    repeats_hooks: bool = False  # asks W again, without new metadata
    slow_cycles: int = 0  # of a GPU's clock, before each write of a forward


def llm_args(model: str, setup: Setup, **changes: Any) -> Any:
    """The LLM arguments of such an engine; `changes` by name, with `kv_` before those of kv_cache_config."""
    cache: dict[str, Any] = {
        "tokens_per_block": setup.shape.tokens,
        "enable_block_reuse": True,
        "enable_partial_reuse": setup.partial,
        "dtype": "auto",
        "host_cache_size": None,
        "max_attention_window": None,
        "use_uvm": False,
    }
    args: dict[str, Any] = {
        "model": model,
        "revision": None,
        "dtype": "bfloat16",
        "attn_backend": "TRTLLM",
        "tensor_parallel_size": setup.num_ranks,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "max_seq_len": 4096,
        "max_beam_width": 1,
        "enable_attention_dp": False,
    }
    for name, value in changes.items():
        if name.startswith("kv_"):
            cache[name.removeprefix("kv_")] = value
        else:
            args[name] = value
    return SimpleNamespace(**args, kv_cache_config=SimpleNamespace(**cache))
