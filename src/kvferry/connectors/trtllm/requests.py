"""What the scheduler's side remembers of one request, and what, beside its tokens, decides its KV."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.client import Lookup
from kvferry.layout import KeyContext

NO_PROMISE = Lookup(0, 0)
# Attributes of a request, whichever of them a release has, that mean KV of more than tokens.
_FOREIGN = {
    "lora_task_id": "a LoRA adapter, of which a connector learns a number only",
    "multimodal_hashes": "multimodal inputs",
    "multimodal_embedding": "multimodal inputs",
    "py_multimodal_data": "multimodal inputs",
    "prompt_embedding_table": "a table of prompt embeddings",
    "mrope_rotary_cos_sin": "positions of its own",
}


class NotExpressible(Exception):
    """The KV of this request depends on something that no key names, so it is neither stored nor reused."""


def context_of(request: Any) -> KeyContext:
    """The context of a request's keys. Raises NotExpressible."""
    for name, what in _FOREIGN.items():
        value = getattr(request, name, None)
        if callable(value):  # some are methods in some releases
            value = value()
        if value is not None and not (isinstance(value, (list, tuple, dict)) and not value):
            raise NotExpressible(what)
    salts = [getattr(request, name, None) for name in ("cache_salt", "cache_salt_id")]
    return KeyContext(salt="" if salts == [None, None] else "/".join(map(repr, salts)))


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from the query for it to its end.

    `name` is what the server calls it. `prompt` are its tokens, of which the first `local_tokens` are in the engine's
    own cache, and `stored_tokens` stored or being stored. `promise`, asked for at `asked_s`, is what is to be loaded,
    up to `wanted_tokens`.
    """

    name: str
    prompt: array[int]
    context: KeyContext | None
    seen_s: float
    promise: Lookup = NO_PROMISE
    asked_s: float = 0.0
    wanted_tokens: int = 0
    local_tokens: int = 0
    stored_tokens: int = 0
    num_stores: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def owes(self) -> bool:
        """Whether the engine counts on tokens that have not been loaded yet."""
        return self.promise.lease_id > 0 and self.wanted_tokens > self.local_tokens


def whole(num_tokens: int, unit: int) -> int:
    """Tokens of the whole units in `num_tokens`."""
    return num_tokens - num_tokens % unit


def targets(blocks: Sequence[int], num_blocks: int, skip_blocks: int) -> tuple[tuple[int, ...], int] | None:
    """The first `num_blocks` ids, and how many of them are not to be touched; None where one that is has no page.

    Blocks that a sliding window has passed have no page, which is -1: as an index that would be somebody else's.
    """
    ids = list(blocks[:num_blocks])
    while skip_blocks < len(ids) and ids[skip_blocks] < 0:
        skip_blocks += 1
    if any(block < 0 for block in ids[skip_blocks:]):
        return None
    return (*(max(0, block) for block in ids[:skip_blocks]), *ids[skip_blocks:]), skip_blocks
