"""Set-ups of TensorRT-LLM that cannot be served end the start, by name; and pools that are not what the model says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles.trt_blocks import PoolShape
from doubles.trt_fixtures import Start, write_model
from doubles.trt_memory import host_memory, layout_over, new_pool
from doubles.trt_requests import Setup, llm_args
from kvferry.connectors.trtllm.caches import pool_of_regions, pool_of_tensor
from kvferry.connectors.trtllm.model import read_config, shape_of
from kvferry.connectors.trtllm.refusals import check_configuration
from kvferry.errors import LayoutError
from kvferry.layout import describe, view_tensors

SETUP = Setup()
V2 = Setup(v2=True, shape=PoolShape(tokens=64))
SHAPE = shape_of({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4})


def args_of(setup: Setup = SETUP, **changes: Any) -> Any:
    return llm_args("m", setup, **changes)


def test_a_plain_configuration_is_served() -> None:
    check_configuration(args_of())
    check_configuration(args_of(kv_max_attention_window=[8192, 8192], kv_dtype="fp8", attn_backend="FLASHINFER"))
    check_configuration(SimpleNamespace(model="m", kv_cache_config=SimpleNamespace(tokens_per_block=32)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"tensor_parallel_size": 2, "orchestrator_type": "ray"}, "use MPI"),
        ({"speculative_config": object()}, "speculative_config is set"),
        ({"sparse_attention_config": object()}, "sparse_attention_config is set"),
        ({"cache_transceiver_config": object()}, "cache_transceiver_config is set"),
        ({"attn_backend": "OTHER"}, "attn_backend is OTHER"),
        ({"kv_enable_block_reuse": False}, "enable_block_reuse is off"),
        ({"kv_host_cache_size": 1 << 30}, "host_cache_size"),
        ({"kv_use_uvm": True}, "use_uvm"),
        ({"kv_dtype": "nvfp4"}, "nvfp4"),
        ({"kv_max_attention_window": [512, 4096]}, "several windows"),
        ({"kv_max_attention_window": [512]}, "max_attention_window is 512"),
    ],
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_configuration(args_of(**changes))


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size.*; kv_cache_config.enable_block_reuse"):
        check_configuration(args_of(pipeline_parallel_size=2, kv_enable_block_reuse=False))


def test_arguments_of_earlier_releases() -> None:
    with pytest.raises(ValueError, match=r"1\.1 and later"):
        check_configuration(SimpleNamespace())


def test_a_refusal_ends_the_start_and_leaves_nothing(start: Start) -> None:
    with pytest.raises(ValueError, match="enable_block_reuse"):
        start(kv_enable_block_reuse=False)
    with pytest.raises(LayoutError, match="= 48; the pool's last axis has 256"):
        start(Setup(shape=PoolShape()), kv_tokens_per_block=6)
    with pytest.raises(LayoutError, match="sliding window of 100"):
        start(dataclasses.replace(V2, window=100))


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}


def test_shapes_of_models() -> None:
    plain = shape_of(CONFIG)
    assert (plain.num_layers, plain.num_kv_heads, plain.head_dim, plain.kv_factor) == (2, 8, 8, 2)
    grouped = shape_of({**CONFIG, "num_key_value_heads": 3, "head_dim": 128})
    assert (grouped.heads_of_rank(1), grouped.heads_of_rank(2), grouped.heads_of_rank(8)) == (3, 2, 1)
    latent = shape_of({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert (latent.num_kv_heads, latent.head_dim, latent.kv_factor) == (1, 576, 1)
    assert shape_of({"n_layer": 3, "n_head": 4, "n_embd": 32}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": None}, "none of num_hidden_layers"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"hidden_size": None}, "none of head_dim"),
        ({"vision_config": {"a": 1}}, "no tokens"),
        ({"is_encoder_decoder": True}, "no tokens"),
        ({"layers_block_type": ["mamba"]}, "states"),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        shape_of({**CONFIG, **changes})


def test_a_model_without_configuration(tmp_path: Path) -> None:
    assert read_config(write_model(tmp_path / "m"), "")["hidden_size"] == 16
    with pytest.raises(LayoutError, match="neither a folder"):
        read_config("nobody/nothing", "")
    (tmp_path / "m" / "config.json").write_text("[]")
    with pytest.raises(LayoutError, match="no JSON object"):
        read_config(str(tmp_path / "m"), "")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(LayoutError, match=r"config\.json"):
        read_config(str(tmp_path / "m"), "")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda pool: pool[:, :1].contiguous(), "has 1 layers, the model 2"),
        (lambda pool: pool[:, :, :1].contiguous(), "has 1 tensors a layer, the model's attention 2"),
        (lambda pool: pool.transpose(1, 2), "not contiguous"),
        (lambda pool: pool[0], "expected"),
        (lambda pool: pool.view(torch.int8), "NVFP4"),
    ],
)
def test_pools_that_are_refused(make: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pool_of_tensor(make(new_pool(SETUP)), args_of(), SHAPE)


def test_a_pool_of_other_elements_than_the_configuration_says() -> None:
    pool = new_pool(SETUP)
    with pytest.raises(LayoutError, match=r"fp8, the pool's torch\.bfloat16"):
        pool_of_tensor(pool, args_of(kv_dtype="fp8"), SHAPE)
    eight = pool.to(torch.float8_e4m3fn)
    made = pool_of_tensor(eight, args_of(kv_dtype="fp8"), SHAPE)
    assert describe(made.format, view_tensors(made.tensors.values())[0], made.hints).dtype == "float8_e4m3fn"


def test_regions_are_planes_over_one_storage() -> None:
    pool = new_pool(V2)
    made = pool_of_regions(layout_over(pool, V2), args_of(V2), SHAPE, host_memory)
    views, owners = view_tensors(made.tensors.values())
    layout = describe(made.format, views, made.hints, names=list(made.tensors))
    assert len(owners) == 1
    assert (layout.block_size, layout.num_blocks, layout.block_bytes) == (64, 24, pool[0].numel() * 2)
    assert [plane.length for plane in layout.planes] == [pool[0].numel() * 2]  # the regions touch
    pool[3, 1] = 7
    assert [bool((row[3] == 7).all()) for row in made.tensors.values()] == [False, True]


def changed(layout: Any, **changes: Any) -> Any:
    """A layout whose one group, or first region, has other fields."""
    group = layout.groups[0]
    for name, value in changes.items():
        if name == "tokens_per_block":
            layout.tokens_per_block = value
        elif hasattr(group, name):
            setattr(group, name, value)
        else:
            setattr(group.regions[0], name, value)
    return layout


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_size": 100}, "sliding window of 100"),
        ({"replicated_regions": (object(),)}, "all ranks share"),
        ({"tokens_per_block": 32}, "has 32 tokens a block"),
        ({"num_slots": 7}, r"regions of \[7, 24\] slots"),
        ({"size": 100}, "a page slot has"),
        ({"buffers": (SimpleNamespace(layer_id=0, role="key_block_scale"),)}, "key_block_scale"),
        ({"buffers": (SimpleNamespace(layer_id=0, role="key", expansion=2),)}, "different sizes"),
    ],
)
def test_regions_that_are_refused(changes: dict[str, Any], text: str) -> None:
    pool = new_pool(V2)
    with pytest.raises(LayoutError, match=text):
        pool_of_regions(changed(layout_over(pool, V2), **changes), args_of(V2), SHAPE, host_memory)


def test_several_groups_and_small_blocks_are_refused() -> None:
    pool = new_pool(V2)
    layout = layout_over(pool, V2)
    layout.groups *= 2
    with pytest.raises(LayoutError, match="2 layer groups"):
        pool_of_regions(layout, args_of(V2), SHAPE, host_memory)
    small = dataclasses.replace(V2, shape=PoolShape())
    with pytest.raises(LayoutError, match="tokens_per_block=64"):
        pool_of_regions(layout_over(new_pool(small), small), args_of(small), SHAPE, host_memory)
