"""Tiny models with random weights, written as checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 512


def llama(folder: Path, seed: int = 7) -> Path:
    """Grouped-query attention, 4 layers, 2 KV heads of 32 elements."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(_config(LlamaConfig)), folder)


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
