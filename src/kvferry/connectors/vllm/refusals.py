"""Which of vLLM's set-ups KVferry cannot serve, and what the user reads then. The engine runs all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Kinds of KV cache whose blocks hold one position's KV after the other's, for all positions. Others are kept out by
# name: a subclass may mean something else by its blocks.
_KNOWN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_ATTENTION_SPECS = _KNOWN_SPECS | {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_UNIFORM = "UniformTypeKVCacheSpecs"


def refusal(vllm_config: Any, kv_cache_config: Any, *, can_sleep: bool) -> str | None:
    """Why no KV of this engine can be stored or reused; None where it can.

    `can_sleep` says that this release of vLLM tells when it takes memory away.
    """
    return next(_refusals(vllm_config, kv_cache_config, can_sleep), None)


def layer_specs(group: Any) -> dict[str, Any]:
    """The KV cache specs of a group's layers by name."""
    spec = group.kv_cache_spec
    if type(spec).__name__ == _UNIFORM:
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)


def _refusals(vllm_config: Any, kv_cache_config: Any, can_sleep: bool) -> Iterator[str]:
    yield from _parallel(vllm_config.parallel_config)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not can_sleep:
        yield (
            "enable_sleep_mode is set: vLLM takes KV memory away while the engine sleeps, and before 0.33 tells no "
            "connector; memory that another process has mapped would not be freed. Start the engine without it"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield "calculate_kv_scales is set: each engine then has scales of its own, which no key names"
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        yield "vLLM says that what this model computes of a prefix cannot be reused (is_prefix_caching_supported)"
    yield from _groups(kv_cache_config.kv_cache_groups)
    if _goes_on_from_no_prefix(vllm_config, kv_cache_config.kv_cache_groups[0]):
        yield (
            "vLLM's latent attention on CPUs gives wrong tokens after a cached prefix; it has switched off its own "
            "prefix cache for that"
        )


def _goes_on_from_no_prefix(vllm_config: Any, group: Any) -> bool:
    is_mla = any(type(spec).__name__ == "MLAAttentionSpec" for spec in layer_specs(group).values())
    on_cpu = vllm_config.device_config.device_type == "cpu"
    return is_mla and on_cpu and not vllm_config.scheduler_config.enable_chunked_prefill


def _parallel(parallel: Any) -> Iterator[str]:
    sizes = {
        "pipeline_parallel_size": "its stages hold different layers",
        "decode_context_parallel_size": "each rank holds other tokens of a block",
        "prefill_context_parallel_size": "each rank holds other tokens of a block",
    }
    for name, why in sizes.items():
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"{name} is {size}, and {why}: not supported, only tensor and data parallelism are"


def _groups(groups: Any) -> Iterator[str]:
    if not groups:
        yield "the model has no KV cache"
        return
    if len(groups) > 1:
        kinds = sorted({type(spec).__name__ for group in groups for spec in layer_specs(group).values()})
        text = f"the model has {len(groups)} KV cache groups ({', '.join(kinds)})"
        if set(kinds) <= _ATTENTION_SPECS:
            yield f"{text}; with --disable-hybrid-kv-cache-manager they are one, which can be reused"
        else:
            yield f"{text}, of which a prefix of tokens cannot restore all"
        return
    for name, spec in layer_specs(groups[0]).items():
        yield from _spec(name, spec)


def _spec(layer: str, spec: Any) -> Iterator[str]:
    kind = type(spec).__name__
    if kind not in _KNOWN_SPECS:
        yield f"layer {layer} has a KV cache of the kind {kind}; known are {', '.join(sorted(_KNOWN_SPECS))}"
    if getattr(spec, "non_causal", False):
        yield f"layer {layer} attends to later tokens, too: its KV is not that of a prefix alone"
    if getattr(spec, "tokens_per_state", 1) != 1:
        yield f"layer {layer} keeps one state for several tokens; not supported"
