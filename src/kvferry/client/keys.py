"""Key chains of requests, remembered: an engine asks for the same prompt again at every step of its scheduler."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from kvferry.layout import KeyChain, KeyContext
from kvferry.layout.keys import encode_tokens

MAX_REQUESTS = 1024
TOKEN_BYTES = 4


class RequestKeys:
    """The chains of the requests that were asked for last. Not thread-safe."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._chains: OrderedDict[str, tuple[tuple[KeyContext, int], bytes, KeyChain]] = OrderedDict()

    def keys(self, request_id: str, tokens: Any, chunk_tokens: int, context: KeyContext) -> bytes:
        """The keys of the whole chunks of `tokens`; only what is new since the last call is hashed.

        Where the request's tokens have changed, and not just grown, its chain is made anew.
        """
        data = encode_tokens(tokens)
        known = self._chains.pop(request_id, None)
        if known is None or known[0] != (context, chunk_tokens) or not data.startswith(known[1]):
            known = ((context, chunk_tokens), b"", KeyChain(chunk_tokens, context))
        kind, before, chain = known
        keys = chain.extend(np.frombuffer(data, dtype="<i4", offset=len(before))) if data != before else chain.hashes
        self._chains[request_id] = (kind, data, chain)
        if len(self._chains) > self._max_requests:
            self._chains.popitem(last=False)
        return keys

    def forget(self, request_id: str) -> None:
        """The request has ended. Idempotent."""
        self._chains.pop(request_id, None)
