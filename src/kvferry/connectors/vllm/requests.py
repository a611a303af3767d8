"""What the scheduler side remembers of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from kvferry.client import Lookup
from kvferry.layout import KeyContext

NO_OFFER = Lookup(0, 0)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from its arrival to its end.

    `name` is what the server calls it. Tokens: `local_tokens` are in the engine's own prefix cache as of the last
    query, `stored_tokens` are stored or being stored. `answer` is that to the question `asked` (tokens of the request,
    `local_tokens`). `ask_again_s` and `give_up_s` bound the wait for lower tiers. `context` knows of `num_inputs`
    multimodal inputs.
    """

    request: Any
    name: str
    context: KeyContext | None
    offer: Lookup = NO_OFFER
    local_tokens: int = 0
    stored_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    loading: bool = False
    loads_allowed: bool = True
    stores_allowed: bool = True
    asked: tuple[int, int] | None = None
    asked_s: float = 0.0
    answer: int | None = 0
    ask_again_s: float = 0.0
    give_up_s: float | None = None
    num_inputs: int = 0
    _prompt: array[int] = field(default_factory=lambda: array("i"))

    def inputs_changed(self) -> bool:
        """Whether a session has gone on with other multimodal inputs since the last time this was asked."""
        before, self.num_inputs = self.num_inputs, len(getattr(self.request, "mm_features", None) or ())
        return self.num_inputs != before

    def tokens(self, count: int) -> array[int]:
        """The first `count` token ids, all of them known ones."""
        prompt = self.request.prompt_token_ids
        if len(self._prompt) != len(prompt):  # vLLM asks many times, and a session's prompt may grow
            self._prompt = array("i", prompt)
        if count <= len(prompt):
            return self._prompt[:count]
        return self._prompt + array("i", self.request.output_token_ids[: count - len(prompt)])

    def committed_tokens(self, computed_tokens: int, *, generated: bool) -> int:
        """How many tokens have final KV once `computed_tokens` are computed.

        vLLM counts as computed what it has only scheduled: drafts that may be rejected, and tokens that are not sampled
        yet. Only tokens whose ids are known count here.
        """
        limit = self.request.num_tokens if generated else self.request.num_prompt_tokens
        return int(min(computed_tokens, limit, self.request.num_tokens))


def whole_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Tokens of the whole chunks in `num_tokens`."""
    return num_tokens - num_tokens % chunk_tokens


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)
