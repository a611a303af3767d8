"""Store the KV of a prompt in a cache server and get it back into other blocks.

    kvferry serve --socket /tmp/kvferry.sock --memory 256MiB &
    python examples/reuse_kv.py /tmp/kvferry.sock

A real engine does the same with its own KV cache and block tables; here the "KV" is random.
"""

from __future__ import annotations

import sys

import torch

from kvferry import CacheClient

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 64, 2


def main(url: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # One tensor a layer, as vLLM's FlashAttention backend lays it out: K and V, blocks, tokens, heads, head size.
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, 4, 64)
    caches = {f"layers.{n}": torch.zeros(shape, dtype=torch.bfloat16, device=device) for n in range(NUM_LAYERS)}
    prompt = list(range(1000, 1200))
    with CacheClient(url) as client:
        client.register_kv_caches(caches, engine_id="example", model="none", format="vllm_flash_attention")
        for cache in caches.values():
            cache.normal_()

        blocks = list(range(1, 14))  # 13 blocks hold the 200 tokens
        stored = client.store(prompt, blocks).wait(timeout_s=30)
        print("stored:", stored)

        found = client.lookup("request-1", prompt)
        print("found", found.tokens, "of", len(prompt), "tokens: whole chunks of", client.chunk_tokens)
        others = list(range(40, 40 + found.tokens // BLOCK_SIZE))
        client.retrieve(found.lease_id, others).wait(timeout_s=30)
        equal = all(torch.equal(cache[:, others], cache[:, blocks[: len(others)]]) for cache in caches.values())
        print("bytes are equal:", equal)


if __name__ == "__main__":
    main(sys.argv[1])
