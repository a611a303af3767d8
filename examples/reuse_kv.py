"""Get the KV of a prompt from a cache server, or store it there; run it twice.

    kvferry serve --socket /tmp/kvferry.sock --memory 256MiB &
    python examples/reuse_kv.py /tmp/kvferry.sock

A real engine does the same with its own KV cache and block tables. Here the "KV" is arithmetic; as with a model's, that
of a token follows from the tokens up to it, and is the same in each run.
"""

from __future__ import annotations

import os
import sys

import torch

from kvferry import CacheClient
from kvferry.errors import KVFerryError

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 16, 64, 2, 4, 64


def compute_kv(prompt: list[int], layer: int) -> torch.Tensor:
    """What a model's layer would give: (2, blocks of the prompt, block size, heads, head size)."""
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    tokens = torch.zeros(num_blocks * BLOCK_SIZE, dtype=torch.int64)
    tokens[: len(prompt)] = torch.tensor(prompt)
    places = torch.arange(1, 2 * NUM_HEADS * HEAD_SIZE + 1) * (layer + 1)
    kv = (tokens.cumsum(0)[:, None] * places) % 251  # whole numbers up to 255 are exact in bfloat16
    return kv.view(num_blocks, BLOCK_SIZE, 2, NUM_HEADS, HEAD_SIZE).permute(2, 0, 1, 3, 4).to(torch.bfloat16)


def reuse(url: str) -> bool:
    """Whether the bytes that came back are those that the model would have computed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # One tensor a layer, as vLLM's FlashAttention backend lays it out: K and V, blocks, tokens, heads, head size.
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(NUM_LAYERS)]
    prompt = list(range(1000, 1200))
    computed = [compute_kv(prompt, layer).to(device) for layer in range(NUM_LAYERS)]
    with CacheClient(url) as client:
        named = {f"layers.{layer}": cache for layer, cache in enumerate(caches)}
        client.register_kv_caches(
            named, engine_id=f"example-{os.getpid()}", model="arithmetic@1", format="vllm_flash_attention"
        )
        found = client.lookup("request-1", prompt, wait_s=5)
        if found.tokens:
            print(found.tokens, "of", len(prompt), "tokens were there already")
        else:
            blocks = list(range(1, 14))  # 13 blocks hold the 200 tokens
            for cache, kv in zip(caches, computed, strict=True):
                cache[:, blocks] = kv
            print("nothing was there: storing", client.store(prompt, blocks).wait(timeout_s=30))
            found = client.lookup("request-1", prompt)
            print("found", found.tokens, "of", len(prompt), "tokens: whole chunks of", client.chunk_tokens)
        others = list(range(40, 40 + found.tokens // BLOCK_SIZE))
        client.retrieve(found.lease_id, others).wait(timeout_s=30)
        pairs = zip(caches, computed, strict=True)
        equal = found.tokens > 0 and all(torch.equal(cache[:, others], kv[:, : len(others)]) for cache, kv in pairs)
        print("their bytes are equal:", equal)
        return equal


def main() -> int:
    if len(sys.argv) != 2:
        print(
            "usage: python examples/reuse_kv.py SOCKET, with what `kvferry serve --socket` was given", file=sys.stderr
        )
        return 2
    try:
        return 0 if reuse(sys.argv[1]) else 1
    except (KVFerryError, ValueError) as error:
        print("reuse_kv:", error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
