"""Tiny models with random weights, written as checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 512
ENGLISH = "the ferry leaves at nine and ten eleven unless wind is from north When does it leave stay"


def llama(folder: Path, seed: int = 7, **fields: int) -> Path:
    """Grouped-query attention, 4 layers, 2 KV heads of 32 elements, where `fields` say nothing else."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(_config(LlamaConfig, **fields)), folder)


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer to a model: every word of a text is a token, of which most are unknown."""
    words = [
        "<unk>",
        *[
            "the",
            "ferry",
            "leaves",
            "at",
            "nine",
            "and",
            "ten",
            "eleven",
            "unless",
            "wind",
            "is",
            "from",
            "north",
            "When",
            "does",
            "it",
            "leave",
            "stay",
        ],
    ]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the queries and values of `llama`."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 128) / 4
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8) / 4
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def deepseek(folder: Path) -> Path:
    """Multi-head latent attention: one latent vector a token and layer, of 512 + 64 elements."""
    torch.manual_seed(7)
    config = _config(
        DeepseekV2Config,
        num_hidden_layers=2,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,  # no layer has experts
    )
    return _save(DeepseekV2ForCausalLM(config), folder)


def gemma(folder: Path) -> Path:
    """Layers with a sliding window of 64 tokens, and layers without: two groups of KV caches."""
    torch.manual_seed(7)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = _config(Gemma3TextConfig, head_dim=32, sliding_window=64, layer_types=kinds)
    return _save(Gemma3ForCausalLM(config), folder)


def _config(kind: Any, **fields: Any) -> Any:
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return kind(**(common | fields))


def _save(model: PreTrainedModel, folder: Path) -> Path:
    """Weights large enough that each token depends on all KV before it: with other KV, other tokens."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids; equal seeds begin alike."""
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(length)]
