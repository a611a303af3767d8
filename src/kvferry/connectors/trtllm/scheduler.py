"""The scheduler's side: what is promised to which request, what is loaded for it, which chunks are stored."""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.client import Lookup
from kvferry.connectors.trtllm.plans import LoadPlan, StepPlan, StorePlan
from kvferry.connectors.trtllm.promises import Promises
from kvferry.connectors.trtllm.requests import NO_PROMISE, NotExpressible, RequestState, context_of, targets, whole
from kvferry.errors import BlockIdError, RequestError
from kvferry.layout import KeyContext

# TensorRT-LLM may end a request without a word; one that has not been in a step for so long has ended.
FORGOTTEN_S = 300.0
# Some pre-releases ask, and let the request wait for its first step. What is promised to it is asked for again before
# the server takes it for overdue, which is after a minute; so long after it was asked for the first time it has ended.
RENEWED_S = 20.0
UNUSED_S = 3600.0
_LOG = logging.getLogger("kvferry.trtllm")


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """What does not change while the engine runs. Sizes in tokens."""

    block_size: int
    chunk_tokens: int


class SchedulerSide:
    """Plans loads and stores of one engine. One thread, the executor's.

    Only prompts are stored, and of them only chunks that a forward has completed by the end of the step.
    """

    def __init__(
        self, rules: SchedulerRules, promises: Promises, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules = rules
        self._promises = promises
        self._clock = clock
        self._states: dict[int, RequestState] = {}
        self._names = itertools.count(1)
        self._told: set[str] = set()
        self._broken: set[int] = set()  # requests whose promise was given back unused
        self._look_s = 0.0

    def __len__(self) -> int:
        return len(self._states)

    def matched(self, request: Any, local_tokens: int) -> int:
        """How many tokens after the engine's own `local_tokens` are promised: whole chunks, short of the last token."""
        self.reset(request.request_id)  # a replay is asked for again
        prompt = array("i", request.get_tokens(0))
        state = RequestState(f"request-{next(self._names)}", prompt, self._context(request), self._clock())
        self._states[request.request_id] = state
        # The last token has to be computed; what reaches to it would be promised in vain.
        limit = whole(len(prompt) - 1, self._rules.chunk_tokens)
        if state.context is None or local_tokens % self._rules.block_size or limit <= local_tokens:
            return 0
        found = self._promises.lookup(state.name, prompt[:limit], state.context)
        state.stored_tokens = found.tokens
        if found.tokens <= local_tokens:
            self._promises.release(found.lease_id)
            return 0
        state.promise, state.local_tokens, state.wanted_tokens = found, local_tokens, found.tokens
        state.asked_s = state.seen_s
        return found.tokens - local_tokens

    def allocated(self, request_id: int, block_ids: Sequence[int]) -> None:
        """The request's blocks, all or the first of them."""
        state = self._states.get(request_id)
        if state is not None:
            state.blocks, state.seen_s = list(block_ids), self._clock()

    def cancel_load(self, request_id: int, start: int, end: int) -> None:
        """Do not load tokens `start` to `end`, at either end of what was promised; the rest of it is counted on still.

        Those at the end will be computed; those at the beginning the engine has itself by now.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if end >= state.wanted_tokens:
            state.wanted_tokens = min(state.wanted_tokens, start)
        elif start <= state.local_tokens:
            state.local_tokens = max(state.local_tokens, end)
        if not state.owes:
            self._give_back(state)

    def plan(self, output: Any) -> StepPlan:
        """The step's work, for TensorRT-LLM's SchedulerOutput. Raises KVFerryError where a promise cannot be kept."""
        loads, stores = [], []
        for data, is_new in self._scheduled(output):
            state = self._states.get(data.request_id)
            if state is None:  # nobody asked for it, as for those that warm up
                self._check_not_broken(data.request_id)
                continue
            state.seen_s = self._clock()
            self._take_blocks(state, data, is_new=is_new)
            computed = data.computed_position + data.num_scheduled_tokens
            if state.promise.lease_id:
                computed += self._loaded_tokens(state, data)
                loads += self._load(data, state)
            stores += self._store(data.request_id, state, computed)
        self._look_after_silent()
        return StepPlan(tuple(loads), tuple(stores), frozenset(data.request_id for data in output.cached_requests))

    def finished(self, request_id: int) -> bool:
        """The request has ended; whether the workers may still be storing its blocks."""
        state = self._drop(request_id)
        return state is not None and state.num_stores > 0

    def reset(self, request_id: int) -> None:
        """The request's blocks are gone, and it begins anew, or has ended. Idempotent."""
        self._drop(request_id)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._promises.close()

    def _context(self, request: Any) -> KeyContext | None:
        try:
            return context_of(request)
        except NotExpressible as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _LOG.warning("requests with %s neither store nor reuse KV: no key can express it", error)
            return None

    def _scheduled(self, output: Any) -> Iterator[tuple[Any, bool]]:
        """All that compute in this step, and whether it is the first step that names them."""
        yield from ((data, True) for data in output.new_requests)
        yield from ((data, False) for data in output.cached_requests)

    def _take_blocks(self, state: RequestState, data: Any, *, is_new: bool) -> None:
        groups = _groups(data)
        if len(groups) > 1:
            raise BlockIdError(f"request {data.request_id} has pages in {len(groups)} layer groups; one is supported")
        ids = groups[0] if groups else data.new_block_ids
        if is_new and ids:
            state.blocks = list(ids)
        else:
            state.blocks.extend(ids)

    def _loaded_tokens(self, state: RequestState, data: Any) -> int:
        """Tokens that this step loads and its position leaves out.

        V2, which tells pages by layer group, and may have pages for one chunk only, may use less than was promised: the
        forward then begins before the end of what is loaded. None are counted there; the next step's position says it.
        """
        if _groups(data) or len(state.blocks) * self._rules.block_size < len(state.prompt):
            return 0
        return state.wanted_tokens - state.local_tokens

    def _load(self, data: Any, state: RequestState) -> list[LoadPlan]:
        """The load of what was promised. The forward will use those blocks: raises where they cannot be filled."""
        rules, promise = self._rules, state.promise
        start = min(state.local_tokens, data.computed_position)  # it may have lost some of its own since it was asked
        wanted = min(state.wanted_tokens, len(state.blocks) * rules.block_size)
        if wanted <= start:
            self._give_back(state)
            return []
        wanted = whole(wanted + rules.chunk_tokens - 1, rules.chunk_tokens)
        if wanted < promise.tokens:
            promise = self._shorter(state, wanted)
        num_blocks = wanted // rules.block_size
        found = targets(state.blocks, num_blocks, start // rules.block_size)
        if len(state.blocks) < num_blocks or found is None:
            raise BlockIdError(
                f"request {data.request_id} has blocks {state.blocks} for {wanted} tokens that were promised"
            )
        state.promise = NO_PROMISE
        block_ids, skip = found
        return [LoadPlan(data.request_id, promise.lease_id, block_ids, skip * rules.block_size)]

    def _shorter(self, state: RequestState, tokens: int) -> Lookup:
        """The promise cut to `tokens`: asking again for less gives another lease in place of the one there is."""
        promise = self._promises.lookup(state.name, state.prompt[:tokens], state.context or KeyContext())
        if promise.tokens != tokens:
            raise RequestError("lease", f"{tokens} of {state.promise.tokens} promised tokens are no longer there")
        return promise

    def _store(self, request_id: int, state: RequestState, computed_tokens: int) -> list[StorePlan]:
        """Store the chunks that are whole after this step, where any are new."""
        rules, context = self._rules, state.context
        committed = min(computed_tokens, len(state.prompt), len(state.blocks) * rules.block_size)
        start, until = whole(state.stored_tokens, rules.chunk_tokens), whole(committed, rules.chunk_tokens)
        if context is None or until <= start or not self._promises.usable:
            return []
        state.stored_tokens = until
        first = start // rules.block_size
        gap = next((at for at in range(first, until // rules.block_size) if state.blocks[at] < 0), None)
        if gap is not None:
            state.context = None  # nothing after a chunk that is missing can be found again
            until = whole(gap * rules.block_size, rules.chunk_tokens)
        found = targets(state.blocks, until // rules.block_size, first)
        if until <= start or found is None:
            return []
        state.num_stores += 1
        return [StorePlan(request_id, state.prompt[:until].tobytes(), context, found[0], start)]

    def _give_back(self, state: RequestState) -> None:
        promise, state.promise = state.promise, NO_PROMISE
        self._promises.release(promise.lease_id)

    def _drop(self, request_id: int) -> RequestState | None:
        self._broken.discard(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._give_back(state)
            self._promises.forget(state.name)
        return state

    def _check_not_broken(self, request_id: int) -> None:
        if request_id in self._broken:
            raise RequestError(
                "lease",
                f"request {request_id} begins more than {UNUSED_S:g} s after KV was promised to it: it was given back",
            )

    def _look_after_silent(self) -> None:
        """Forget requests that have ended without a word; keep up the promises to those that wait."""
        now = self._clock()
        if now < self._look_s:
            return
        self._look_s = now + RENEWED_S / 2
        for request_id, state in list(self._states.items()):
            owes = state.owes
            if now - state.seen_s > (UNUSED_S if owes else FORGOTTEN_S):
                self._drop(request_id)
                if owes:  # were it to begin after all, its blocks would be taken for filled
                    self._broken.add(request_id)
            elif owes and now - state.asked_s > RENEWED_S:
                state.asked_s = now
                self._renew(state)

    def _renew(self, state: RequestState) -> None:
        promise = state.promise
        found = self._promises.lookup(state.name, state.prompt[: promise.tokens], state.context or KeyContext())
        if found.tokens == promise.tokens:
            state.promise = found


def _groups(data: Any) -> Sequence[Sequence[int]]:
    """The new pages by layer group, where this release and cache tell them so."""
    return getattr(data, "new_block_ids_by_layer_group", None) or ()
