"""Which of TensorRT-LLM's set-ups KVferry cannot serve. They end the start: no promise could be kept there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What to do where the pool is memory that no other process can map.
UNSHARED = (
    "KV cache manager V2 makes virtual memory with fabric handles where the driver permits them, and else with none: "
    "set kv_cache_config.use_kv_cache_manager_v2=False there. V1's pool can be shared unless use_uvm or the option for "
    "sleeping engines is on"
)
ATTENTION_LAYOUTS = {"TRTLLM": "HND", "FLASHINFER": "NHD", "VANILLA": "NHD"}


def check_configuration(llm_args: Any) -> None:
    """Raise ValueError for what cannot be served, saying all of it."""
    if getattr(llm_args, "kv_cache_config", None) is None:
        raise ValueError(
            f"KVferry's connector was given a {type(llm_args).__name__} without kv_cache_config; it needs the LLM "
            "arguments that TensorRT-LLM 1.1 and later give to connectors"
        )
    found = [*_parallel(llm_args), *_cache(llm_args.kv_cache_config, llm_args), *_model(llm_args)]
    if found:
        raise ValueError(f"KVferry cannot serve this TensorRT-LLM: {'; '.join(found)}")


def _parallel(args: Any) -> Iterator[str]:
    sizes = {
        "pipeline_parallel_size": "its stages hold different layers",
        "context_parallel_size": "each rank holds other tokens",
    }
    for name, why in sizes.items():
        size = getattr(args, name, None) or 1
        if size > 1:
            yield f"{name} is {size}, and {why}: only tensor parallelism is supported"
    if getattr(args, "enable_attention_dp", False):
        yield "enable_attention_dp is set, where each rank has requests of its own: not supported"
    if (getattr(args, "tensor_parallel_size", 1) or 1) > 1 and getattr(args, "orchestrator_type", None) == "ray":
        yield "orchestrator_type is 'ray', under which ranks do not learn of one engine: use MPI"
    if (getattr(args, "max_beam_width", 1) or 1) > 1:
        yield "max_beam_width is above 1: beams have blocks of their own"


def _cache(cache: Any, args: Any) -> Iterator[str]:
    if not getattr(cache, "enable_block_reuse", True):
        yield "kv_cache_config.enable_block_reuse is off, and then no connector is ever asked for KV: switch it on"
    if getattr(cache, "host_cache_size", None):
        yield "kv_cache_config.host_cache_size is set, and blocks then move without notice; the server takes its place"
    if getattr(cache, "use_uvm", False):
        yield "kv_cache_config.use_uvm is set: managed memory cannot be shared with another process"
    if str(getattr(cache, "dtype", "auto")).lower() == "nvfp4":
        yield "kv_cache_config.dtype is nvfp4: its scales are in a pool that no connector is given"
    windows = getattr(cache, "max_attention_window", None)
    if windows and len(set(windows)) > 1:
        yield "kv_cache_config.max_attention_window names several windows, and so several pools"
    elif windows and windows[0] < (getattr(args, "max_seq_len", None) or windows[0] + 1):
        yield (
            f"kv_cache_config.max_attention_window is {windows[0]}: what a window has passed is gone, so that the KV "
            "of a prefix cannot be kept; set max_seq_len to no more than it, or leave it out"
        )


def _model(args: Any) -> Iterator[str]:
    why = {
        "speculative_config": "drafts have layers, or caches, of their own",
        "sparse_attention_config": "the indexer's cache is in a pool that no connector is given",
        "cache_transceiver_config": "TensorRT-LLM's own disaggregation moves the same blocks",
    }
    for name, reason in why.items():
        if getattr(args, name, None) is not None:
            yield f"{name} is set: {reason}"
    backend = str(getattr(args, "attn_backend", "TRTLLM"))
    if backend not in ATTENTION_LAYOUTS:
        yield f"attn_backend is {backend}; how it lays out blocks is known of {', '.join(ATTENTION_LAYOUTS)}"
