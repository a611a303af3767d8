"""Key chains of requests, remembered: an engine asks for the same prompt again at every step of its scheduler."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from kvferry.layout import HASH_BYTES, KeyChain, KeyContext
from kvferry.layout.keys import encode_tokens

MAX_REQUESTS = 1024
MAX_BYTES = 64 << 20
TOKEN_BYTES = 4
_Known = tuple[tuple[KeyContext, int], bytes, KeyChain]


class RequestKeys:
    """The chains of the requests that were asked for last, and that fit into `max_bytes`. Not thread-safe.

    Who is forgotten is hashed again.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._chains: OrderedDict[str, _Known] = OrderedDict()

    def keys(self, request_id: str, tokens: Any, chunk_tokens: int, context: KeyContext) -> bytes:
        """The keys of the whole chunks of `tokens`; only what is new since the last call is hashed.

        Where the request's tokens have changed, and not just grown, its chain is made anew.
        """
        data = encode_tokens(tokens)
        known = self._pop(request_id)
        if known is None or known[0] != (context, chunk_tokens) or not data.startswith(known[1]):
            known = ((context, chunk_tokens), b"", KeyChain(chunk_tokens, context))
        kind, before, chain = known
        keys = chain.extend(np.frombuffer(data, dtype="<i4", offset=len(before))) if data != before else chain.hashes
        self._chains[request_id] = (kind, data, chain)
        self._bytes += _size(data, chain)
        while len(self._chains) > 1 and (len(self._chains) > self._max_requests or self._bytes > self._max_bytes):
            self._pop(next(iter(self._chains)))
        return keys

    def forget(self, request_id: str) -> None:
        """The request has ended. Idempotent."""
        self._pop(request_id)

    def _pop(self, request_id: str) -> _Known | None:
        known = self._chains.pop(request_id, None)
        if known is not None:
            self._bytes -= _size(known[1], known[2])
        return known


def _size(tokens: bytes, chain: KeyChain) -> int:
    return len(tokens) + chain.num_tokens // chain.chunk_tokens * HASH_BYTES
