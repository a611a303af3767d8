"""What the bytes of a KV cache mean: planes, formats of engines, keys of chunks. Pure: no GPU, no torch."""

from __future__ import annotations

from kvferry.layout.engines import FORMATS, describe
from kvferry.layout.hints import LayoutHints, TensorView
from kvferry.layout.keys import (
    HASH_BYTES,
    ChunkKeys,
    KeyChain,
    KeyContext,
    chain_hashes,
    chunk_tokens_for,
    encode_tokens,
    namespace,
)
from kvferry.layout.planes import KVLayout, Plane
from kvferry.layout.tensors import view_tensors
from kvferry.layout.trtllm import trtllm_view_6d

__all__ = [
    "ChunkKeys",
    "FORMATS",
    "HASH_BYTES",
    "KVLayout",
    "KeyChain",
    "KeyContext",
    "LayoutHints",
    "Plane",
    "TensorView",
    "chain_hashes",
    "chunk_tokens_for",
    "describe",
    "encode_tokens",
    "namespace",
    "trtllm_view_6d",
    "view_tensors",
]
