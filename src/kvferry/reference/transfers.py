"""The KV of a reference engine's prompts, sent to another engine or awaited from one.

What goes over is whole chunks, short of the last token, into blocks of the receiver's own choice; the receiver computes
the rest in the steps in which it would have computed it anyhow. So its tokens are, bit for bit, those it gives alone.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.errors import TransferError
from kvferry.p2p import P2pConfig, P2pNcclEngine, Receiving, Sending
from kvferry.reference.engine import KV_FORMAT, ReferenceEngine, Request

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Answer", "Expected", "KVTransfers"]


_CALLBACK_S = 10.0


class Expected(NamedTuple):
    """A prompt, the KV of whose first `num_tokens` tokens is to come.

    Its blocks are the transfer's until that has ended; `ended` gets that moment (monotonic seconds).
    """

    request: Request
    num_tokens: int
    receiving: Receiving
    ended: queue.SimpleQueue[float]


class Answer(NamedTuple):
    """What became of an expected prompt. Times are monotonic seconds, which all processes of a host share.

    `failure` says why the KV did not come; the prompt was then computed, so the tokens are right.
    """

    tokens: list[int]
    received_tokens: int
    ended_at: float
    first_token_at: float
    failure: str | None


class KVTransfers:
    """Sends and receives for one engine, by a `P2pNcclEngine` of its own. One thread, as the engine."""

    def __init__(self, engine: ReferenceEngine, config: P2pConfig) -> None:
        """Raises LayoutError where the carrier that the config names cannot move this engine's KV."""
        self._engine = engine
        self.p2p = P2pNcclEngine(config)
        try:
            self.p2p.register_kv_caches(engine.cache.named_layers(), format=KV_FORMAT)
        except BaseException:
            self.p2p.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way. Idempotent."""
        self.p2p.close()

    def prefill(self, transfer_id: str, tokens: Sequence[int], address: str) -> tuple[Request, Sending, float]:
        """Compute the chunks of a prompt that can be sent, each layer being sent once it is there.

        The request, its sending, and when (monotonic) the last layer's KV was there. The caller closes the request.
        """
        device, computed_at = self._engine.device, 0.0

        def layer_ready(layer: int) -> None:
            nonlocal computed_at
            if layer == self._engine.config.model.num_layers - 1:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                computed_at = time.monotonic()
            sending.layer_ready(layer)

        request = self._engine.open(tokens[: self._num_sent(tokens)])
        sending = self.p2p.send_blocks(transfer_id, request.blocks, address, layer_wise=True)
        try:
            self._engine.prefill(request, layer_ready)
        except BaseException:
            sending.cancel()
            raise
        return request, sending, computed_at

    def send_again(self, transfer_id: str, request: Request, address: str, num_layers: int) -> Sending:
        """Send what `prefill` has computed for a request; only the first `num_layers` layers are said to be ready."""
        sending = self.p2p.send_blocks(transfer_id, request.blocks, address, layer_wise=True)
        for layer in range(num_layers):
            sending.layer_ready(layer)
        return sending

    def expect(self, transfer_id: str, tokens: Sequence[int], max_new_tokens: int, timeout_s: float) -> Expected:
        """Give blocks to a prompt and let what comes under this id land in them; `answer` closes the request."""
        request = self._engine.open(tokens, max_new_tokens)
        num_tokens = self._num_sent(tokens)
        blocks = request.blocks[: num_tokens // self._engine.config.paged.block_size]
        receiving = self.p2p.receive_blocks(transfer_id, blocks, timeout_s=timeout_s)
        ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        receiving.add_done_callback(lambda _: ended.put(time.monotonic()))
        return Expected(request, num_tokens, receiving, ended)

    def answer(self, expected: Expected, max_new_tokens: int) -> Answer:
        """Wait for the KV, compute the rest, or all where it does not come, and decode greedily."""
        request, failure = expected.request, None
        try:
            try:
                expected.receiving.wait()
                request.computed = expected.num_tokens
            except TransferError as error:  # nothing touches the blocks any more
                failure = str(error)
            received, ended_at = request.computed, expected.ended.get(timeout=_CALLBACK_S)
            tokens, first_at = self._engine.answer(request, max_new_tokens)
        finally:
            self._engine.close(request)
        return Answer(tokens, received, ended_at, first_at, failure)

    def _num_sent(self, tokens: Sequence[int]) -> int:
        chunk = self._engine.config.chunk_tokens
        count = (len(tokens) - 1) // chunk * chunk
        if count < 1:
            raise ValueError(f"a prompt of {len(tokens)} tokens has nothing to send: give it more than {chunk}")
        return count
