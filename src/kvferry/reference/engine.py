"""A small inference engine: chunk-aligned prefill, greedy decode, and reuse of KV through a cache server.

Exactness rests on two rules. Prefill always runs in steps that begin at multiples of `chunk_tokens`, so that a token's
KV comes from the same shapes and the same arithmetic whether its predecessors were computed or retrieved; and only
whole chunks that prefill computed are stored. Logits with and without reuse are then equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from kvferry.client import CacheClient, Job, RetrieveResult
from kvferry.errors import DeadlineError, KVFerryError
from kvferry.layout import chunk_tokens_for
from kvferry.reference.model import Attend, Model, ModelConfig
from kvferry.reference.paged import BlockPool, PagedCache, PagedConfig

__all__ = ["KV_FORMAT", "EngineConfig", "Generation", "ReferenceEngine", "Request"]

KV_FORMAT = "vllm_flash_attention"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Model, cache and device of one engine. `shuffle_seed` orders its free blocks (None: ascending)."""

    model: ModelConfig
    paged: PagedConfig
    device: str = "cpu"
    shuffle_seed: int | None = 0
    timeout_s: float = 60.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens_for(self.paged.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * self.dtype.itemsize


@dataclasses.dataclass
class Request:
    """One sequence in the engine: its tokens, its block table, and how many of its tokens have KV in the cache."""

    request_id: str
    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` did. `ttft_ms` runs from the call to the first token's value on the host.

    `reuse_failure` says why a promised reuse came to nothing; the prompt was then computed, so the tokens are right.
    """

    tokens: list[int]
    reused_tokens: int
    ttft_ms: float
    reuse_failure: str | None = None


class ReferenceEngine:
    """The engine. One thread; every call blocks until its result is there."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.model = Model(config.model, self.device, config.dtype)
        self.cache = PagedCache(config.model, config.paged, self.device, config.dtype)
        self.pool = BlockPool(config.paged.num_blocks, config.shuffle_seed)
        self._client: CacheClient | None = None
        self._request_numbers = itertools.count()

    def connect(self, client: CacheClient, engine_id: str) -> None:
        """Register this engine's KV cache with a server; the caller keeps and closes `client`."""
        client.register_kv_caches(
            self.cache.named_layers(), engine_id=engine_id, model=self.config.model.name, format=KV_FORMAT
        )
        self._client = client

    def open(self, tokens: Sequence[int], max_new_tokens: int = 0) -> Request:
        """Give blocks to a prompt and the tokens to come. The caller closes the request."""
        if not tokens:
            raise ValueError("an empty prompt: at least one token is needed")
        count = -(-(len(tokens) + max_new_tokens) // self.config.paged.block_size)
        return Request(f"request-{next(self._request_numbers)}", list(tokens), self.pool.allocate(count))

    def close(self, request: Request) -> None:
        """Take the request's blocks back. Idempotent."""
        self.pool.free(request.blocks)
        request.blocks = []

    def reuse(self, request: Request, kv_of: Sequence[int] | None = None) -> int:
        """Retrieve the KV of the longest stored prefix, short of the last token; the number of tokens it covers.

        `kv_of` puts the KV of another prompt in its place, which makes the tokens wrong: the control of demo and tests.
        Raises a `KVFerryError` where the server could not deliver; the request then stands as before.
        """
        client = self._connected()
        prompt = (request.tokens if kv_of is None else list(kv_of))[: len(request.tokens) - 1]
        promise = client.lookup(request.request_id, prompt)
        if promise.tokens == 0:
            return 0
        try:
            blocks = request.blocks[: promise.tokens // self.config.paged.block_size]
            self._finish(client.retrieve(promise.lease_id, blocks), request)
        finally:
            client.release(promise.lease_id)
        request.computed = promise.tokens
        return promise.tokens

    @torch.inference_mode()
    def prefill(self, request: Request, layer_ready: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute what has no KV yet; float32 logits [vocab_size] after the last token.

        `layer_ready` is told of each layer once the KV of all tokens is in it, or queued on the current CUDA stream.
        """
        chunk = self.config.chunk_tokens
        if request.computed % chunk or request.computed >= len(request.tokens):
            raise ValueError(
                f"{request.computed} of {len(request.tokens)} tokens have KV: prefill starts at a multiple of {chunk} "
                f"and computes at least the last token"
            )
        while True:
            left = len(request.tokens) - request.computed
            logits = self._step(request, min(chunk, left), layer_ready if left <= chunk else None)
            if request.computed == len(request.tokens):
                return logits

    def store(self, request: Request, prompt_tokens: int | None = None) -> int:
        """Send the whole chunks of the prompt to the server and wait; the number of tokens that are there then.

        Tokens beyond `prompt_tokens` came out of decode, one at a time: other shapes, so other bits. They stay here.
        """
        limit = min(request.computed, len(request.tokens) if prompt_tokens is None else prompt_tokens)
        whole = limit - limit % self.config.chunk_tokens
        if not whole:
            return 0
        blocks = request.blocks[: whole // self.config.paged.block_size]
        result = self._connected().store(request.tokens[:whole], blocks).wait(self.config.timeout_s)
        return (result.num_stored + result.num_present) * self.config.chunk_tokens

    @torch.inference_mode()
    def decode(self, request: Request, first: int, count: int) -> list[int]:
        """`count` greedy tokens, of which `first` is the first; the KV of all but the last is in the cache."""
        request.tokens.append(first)
        produced = [first]
        while len(produced) < count:
            produced.append(_greedy(self._step(request, 1)))
            request.tokens.append(produced[-1])
        return produced

    def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        reuse: bool = False,
        kv_of: Sequence[int] | None = None,
        store: bool = False,
    ) -> Generation:
        """Serve one prompt from start to end: reuse what is stored, compute the rest, decode greedily, maybe store."""
        started = time.monotonic()
        request = self.open(tokens, max_new_tokens)
        try:
            reused, failure = self._try_reuse(request, kv_of) if reuse else (0, None)
            produced, first_at = self.answer(request, max_new_tokens)
            if store:
                self.store(request, len(tokens))
            return Generation(produced, reused, (first_at - started) * 1e3, failure)
        finally:
            self.close(request)

    def answer(self, request: Request, max_new_tokens: int) -> tuple[list[int], float]:
        """Compute what has no KV yet, decode greedily; the tokens, and when (monotonic) the first was on the host."""
        first = _greedy(self.prefill(request))
        first_at = time.monotonic()
        return self.decode(request, first, max_new_tokens), first_at

    def _try_reuse(self, request: Request, kv_of: Sequence[int] | None) -> tuple[int, str | None]:
        """Reuse, or the reason why not: a cache that cannot deliver costs time, never a request."""
        try:
            return self.reuse(request, kv_of), None
        except KVFerryError as error:
            if not request.blocks:
                raise
            return 0, str(error)

    def _finish(self, job: Job[RetrieveResult], request: Request) -> None:
        """Wait for a retrieve, and stop it where it takes too long, so that nothing else writes to the blocks after.

        Where it cannot be stopped either, the request loses its blocks for ever: bytes may still land in them.
        """
        try:
            job.wait(self.config.timeout_s)
        except DeadlineError:
            try:
                stopped = job.cancel(self.config.timeout_s)
            except DeadlineError:
                request.blocks = []
                raise
            if stopped:
                raise

    def _step(self, request: Request, count: int, layer_ready: Callable[[int], None] | None = None) -> torch.Tensor:
        start = request.computed
        tokens = torch.tensor(request.tokens[start : start + count], device=self.device)
        attend = self.cache.attend(request.blocks, start, count)
        logits = self.model.step(tokens, start, attend if layer_ready is None else _telling(attend, layer_ready))
        request.computed = start + count
        return logits

    def _connected(self) -> CacheClient:
        if self._client is None:
            raise ValueError("this engine has no cache server; call connect() first")
        return self._client


def _telling(attend: Attend, layer_ready: Callable[[int], None]) -> Attend:
    def attend_layer(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixed = attend(layer, q, k, v)
        layer_ready(layer)
        return mixed

    return attend_layer


def _greedy(logits: torch.Tensor) -> int:
    return int(logits.argmax())
