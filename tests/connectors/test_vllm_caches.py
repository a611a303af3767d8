"""Formats by shapes, and set-ups that are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connectors.vllm.caches import choose_format
from kvferry.connectors.vllm.refusals import layer_specs, refusal
from kvferry.errors import LayoutError


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 16 * 2 * 64 * 2 * 2


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = 16


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: list[str] = field(default_factory=lambda: ["l.0"])


def config(**changes: Any) -> Any:
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, **changes.pop("parallel", {})}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            enable_sleep_mode=changes.get("sleep", False), is_prefix_caching_supported=changes.get("prefix", True)
        ),
        device_config=SimpleNamespace(device_type=changes.get("device", "cuda")),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=changes.get("chunked", True)),
        cache_config=SimpleNamespace(calculate_kv_scales=changes.get("scales", False)),
    )


def caches(*groups: Group) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=8)


@pytest.mark.parametrize(
    ("shape", "spec", "wanted"),
    [
        ((8, 2, 16, 128), FullAttentionSpec(), "vllm_packed"),
        ((2, 8, 16, 2, 64), FullAttentionSpec(), "vllm_flash_attention"),
        ((8, 2, 16, 2, 64), FullAttentionSpec(), "vllm_flashinfer"),
        ((8, 16, 576), MLAAttentionSpec(page_size_bytes=16 * 576 * 2), "mla"),
        ((8, 1, 16, 576), MLAAttentionSpec(page_size_bytes=16 * 576 * 2), "mla"),
        ((16, 1, 8, 576), MLAAttentionSpec(page_size_bytes=16 * 576 * 2), "mla"),  # two kernel blocks a block
    ],
)
def test_formats(shape: tuple[int, ...], spec: Any, wanted: str) -> None:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    assert choose_format({"l.0": tensor}, {"l.0": spec}, 8) == wanted


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([(8, 2)], "not known"),
        ([(2, 2, 16, 2, 64)], "not known"),  # K and V, or blocks?
        ([(8, 2, 16, 128), (2, 8, 16, 2, 64)], "all must have the same"),
        ([(8, 2, 16, 64)], "vLLM's configuration says 8192"),  # half of each block is not in the view
    ],
)
def test_unknown_tensors(shapes: list[tuple[int, ...]], text: str) -> None:
    tensors = {f"l.{n}": torch.empty(shape, dtype=torch.bfloat16) for n, shape in enumerate(shapes)}
    blocks = 2 if shapes[0][:2] == (2, 2) else 8
    with pytest.raises(LayoutError, match=text):
        choose_format(tensors, dict.fromkeys(tensors, FullAttentionSpec()), blocks)


@pytest.mark.parametrize(
    ("settings", "cache", "text"),
    [
        (
            {"parallel": {"pipeline_parallel_size": 2}},
            caches(Group(FullAttentionSpec())),
            "pipeline_parallel_size",
        ),
        ({"parallel": {"decode_context_parallel_size": 2}}, caches(Group(FullAttentionSpec())), "decode_context"),
        ({"sleep": True}, caches(Group(FullAttentionSpec())), "enable_sleep_mode"),
        ({"scales": True}, caches(Group(FullAttentionSpec())), "calculate_kv_scales"),
        ({"prefix": False}, caches(Group(FullAttentionSpec())), "is_prefix_caching_supported"),
        ({"device": "cpu", "chunked": False}, caches(Group(MLAAttentionSpec())), "latent attention on CPUs"),
        ({}, caches(), "no KV cache"),
        ({}, caches(Group(SinkFullAttentionSpec())), "SinkFullAttentionSpec"),
        ({}, caches(Group(SlidingWindowSpec())), "SlidingWindowSpec"),
        (
            {},
            caches(Group(FullAttentionSpec()), Group(SlidingWindowSpec())),
            "--disable-hybrid-kv-cache-manager",
        ),
        ({}, caches(Group(FullAttentionSpec()), Group(MambaSpec())), "cannot restore all"),
    ],
)
def test_refusals(settings: dict[str, Any], cache: Any, text: str) -> None:
    found = refusal(config(**settings), cache, can_sleep=False)
    assert found is not None
    assert text in found


def test_no_refusal() -> None:
    assert refusal(config(), caches(Group(FullAttentionSpec())), can_sleep=False) is None
    mla = caches(Group(MLAAttentionSpec()))
    assert refusal(config(device="cpu"), mla, can_sleep=False) is None
    assert refusal(config(chunked=False), mla, can_sleep=False) is None
    both = UniformTypeKVCacheSpecs({"l.0": MLAAttentionSpec(), "l.1": MLAAttentionSpec()})
    assert refusal(config(), caches(Group(both)), can_sleep=False) is None
    assert set(layer_specs(Group(both))) == {"l.0", "l.1"}


def test_sleep_mode_where_vllm_tells_of_it() -> None:
    assert refusal(config(sleep=True), caches(Group(FullAttentionSpec())), can_sleep=True) is None


def test_a_layer_that_sees_later_tokens_is_refused() -> None:
    spec = FullAttentionSpec()
    spec.non_causal = True  # type: ignore[attr-defined]
    assert "later tokens" in (refusal(config(), caches(Group(spec)), can_sleep=False) or "")
