"""A tiny Llama with random weights, written as a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 512


def llama(folder: Path, seed: int = 7) -> Path:
    """Grouped-query attention, 4 layers, 2 KV heads of 16 elements."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.25,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(seed: int, num_tokens: int) -> list[int]:
    """The tokens of prompt number `seed`; prompts of one seed are prefixes of each other."""
    source = random.Random(seed)
    return [source.randrange(5, VOCAB) for _ in range(num_tokens)]
