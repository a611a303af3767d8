"""What vLLM's SchedulerOutput says of a step: which requests compute, how far, and in which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol


class HasBlocks(Protocol):
    """A request of which is remembered what blocks it has: those of its first group, in order."""

    blocks: list[int]


def scheduled(output: Any, states: Mapping[str, HasBlocks]) -> Iterator[tuple[str, int]]:
    """Each request that computes in this step, with how many of its tokens are computed after it.

    The blocks of those that are among `states` are brought up to date.
    """
    for new in output.scheduled_new_reqs:
        _set(states.get(new.req_id), new.block_ids)
        yield new.req_id, new.num_computed_tokens + output.num_scheduled_tokens.get(new.req_id, 0)
    cached = output.scheduled_cached_reqs
    for request_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        state = states.get(request_id)
        if request_id in cached.resumed_req_ids:
            _set(state, block_ids)
        elif state is not None and block_ids is not None:
            state.blocks.extend(block_ids[0])
        yield request_id, computed + output.num_scheduled_tokens.get(request_id, 0)


def _set(state: HasBlocks | None, groups: Sequence[Iterable[int]] | None) -> None:
    if state is not None:
        state.blocks = list(groups[0]) if groups else []
