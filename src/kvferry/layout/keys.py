"""Keys of KV chunks: hash chains over token ids that are the same in every process, on every host, in every run.

The encoding is fixed: token ids as little-endian int32, every other part with its length before it, SHA-256 over both.
No key depends on Python's own hash, and so none on PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

HASH_BYTES = 32
_TOKEN_BYTES = 4
_INT32 = np.iinfo(np.int32)


class KeyContext(msgspec.Struct, frozen=True):
    """What, beside the tokens, makes KV differ: the LoRA's name, a salt, the ids of multimodal inputs in order."""

    lora: str = ""
    salt: str = ""
    multimodal: tuple[str, ...] = ()


_NO_CONTEXT = KeyContext()


class ChunkKeys(msgspec.Struct, frozen=True):
    """Keys of consecutive chunks, 32 bytes each, that an engine has made: each stands for all tokens up to its end.

    Raises ValueError where they are no whole number.
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % HASH_BYTES:
            raise ValueError(f"{len(self.data)} bytes of keys; each key has {HASH_BYTES}")

    @classmethod
    def from_hex(cls, keys: Sequence[str]) -> ChunkKeys:
        """Raises ValueError for what are no SHA-256 digests in hexadecimal."""
        digests = [bytes.fromhex(key) for key in keys]
        if any(len(digest) != HASH_BYTES for digest in digests):
            raise ValueError(f"keys of other than {HASH_BYTES} bytes: {keys!r:.200}")
        return cls(b"".join(digests))

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES


class KeyChain:
    """The chain of one request, grown as its tokens come; nothing is hashed twice. Not thread-safe."""

    def __init__(self, chunk_tokens: int, context: KeyContext = _NO_CONTEXT) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; a chunk has at least one token")
        self.chunk_tokens = chunk_tokens
        self.num_tokens = 0
        self._last = _seed(chunk_tokens, context)
        self._tail = b""
        self._hashes = bytearray()

    @property
    def hashes(self) -> bytes:
        """The hashes of all whole chunks so far, 32 bytes each."""
        return bytes(self._hashes)

    def extend(self, tokens: Any) -> bytes:
        """Append tokens (those after the first `num_tokens` of the request) and return `hashes`.

        Raises ValueError for token ids outside int32, TypeError for what is no sequence of integers.
        """
        added = encode_tokens(tokens)
        data = self._tail + added if self._tail else added
        size = self.chunk_tokens * _TOKEN_BYTES
        whole = len(data) - len(data) % size
        last, fresh, hashes = self._last, hashlib.sha256().copy, []  # a copy costs OpenSSL less than a new one
        for (chunk,) in struct.iter_unpack(f"{size}s", data[:whole]):
            state = fresh()
            state.update(last)
            state.update(chunk)
            last = state.digest()
            hashes.append(last)
        self._hashes += b"".join(hashes)
        self._last, self._tail = last, data[whole:]
        self.num_tokens += len(added) // _TOKEN_BYTES
        return self.hashes


def chain_hashes(tokens: Any, chunk_tokens: int, context: KeyContext = _NO_CONTEXT) -> bytes:
    """The hashes of the whole chunks of `tokens`, 32 bytes each; hash `i` stands for all tokens up to chunk `i`'s end.

    `tokens`: a list, array, NumPy array or CPU torch tensor of one axis.
    """
    return KeyChain(chunk_tokens, context).extend(tokens)


def namespace(model: str, fingerprint: bytes, *, rank: int, world_size: int, tenant: str) -> bytes:
    """32 bytes that keep apart KV that must never be mixed: models, layouts, ranks, tenants."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world size {world_size}; ranks go from 0 to world size - 1")
    parts = (b"kvferry.namespace.1", model.encode(), fingerprint, struct.pack("<QQ", rank, world_size), tenant.encode())
    return digest(parts)


def chunk_tokens_for(block_size: int, minimum: int = 64) -> int:
    """The smallest multiple of `block_size` (tokens) that is at least `minimum`."""
    if block_size < 1 or minimum < 1:
        raise ValueError(f"block size {block_size} and minimum {minimum} must be at least one token")
    return -(-minimum // block_size) * block_size


def encode_tokens(tokens: Any) -> bytes:
    """Token ids as little-endian int32. Raises ValueError outside int32, TypeError for anything but integers."""
    if isinstance(tokens, np.ndarray) or hasattr(tokens, "numpy"):
        return _encode_array(tokens if isinstance(tokens, np.ndarray) else tokens.numpy())
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens are {type(tokens).__name__}; give token ids as integers")
    if isinstance(tokens, (array, memoryview)):
        return _encode_array(np.asarray(tokens))
    return _encode_sequence(tokens)


def _encode_array(values: np.ndarray[Any, Any]) -> bytes:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        if values.size == 0 and values.ndim == 1:
            return b""
        raise TypeError(f"tokens are a {values.dtype} array of {values.ndim} axes; give one axis of integers")
    if values.size and values.dtype != np.int32:
        low, high = int(values.min()), int(values.max())
        if low < _INT32.min or high > _INT32.max:
            raise ValueError(f"token ids from {low} to {high}; they must fit into int32")
    return values.astype("<i4", copy=False).tobytes()


def _encode_sequence(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        if all(hasattr(token, "__index__") for token in tokens):
            raise ValueError(f"a token id does not fit into int32: {error}") from None
        raise TypeError(f"tokens must be integers: {error}") from None


def _seed(chunk_tokens: int, context: KeyContext) -> bytes:
    multimodal = [text.encode() for text in context.multimodal]
    counts = struct.pack("<QQ", chunk_tokens, len(multimodal))
    return digest((b"kvferry.chain.1", counts, context.lora.encode(), context.salt.encode(), *multimodal))


def digest(parts: Sequence[bytes]) -> bytes:
    """SHA-256 of the parts, each with its length before it, so that no two lists of parts are hashed alike."""
    return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
