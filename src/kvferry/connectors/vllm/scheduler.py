"""The scheduler's side: which requests load, and which chunks are stored."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.vllm.counters import Counters
from kvferry.connectors.vllm.jobs import JobTable
from kvferry.connectors.vllm.keys import NotExpressible
from kvferry.connectors.vllm.plans import LoadPlan, StepPlan, StorePlan, WorkReport
from kvferry.connectors.vllm.promises import Promises
from kvferry.connectors.vllm.requests import NO_OFFER, RequestState, num_blocks, whole_chunks
from kvferry.connectors.vllm.steps import scheduled
from kvferry.layout import KeyContext

ASK_AGAIN_S = 0.002
# vLLM asks at every step for a request that it has no room for. The lease holds much longer.
ANSWER_HOLDS_S = 0.25
# How long vLLM is asked to keep stepping, or to wait instead of preempting, for jobs that must end soon.
SOON_S = 5.0
VERY_SOON_S = 0.5
STUCK_S = 3.0  # a server that has not ended a store after so long is given no other
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """What does not change while the engine runs. Sizes in tokens."""

    block_size: int
    chunk_tokens: int
    world_size: int
    loads: bool = True
    stores: bool = True
    store_generated: bool = False
    disk_wait_s: float = 2.0


class SchedulerSide:
    """Plans loads and stores. One thread, vLLM's scheduler's; no call waits longer for the server than `Promises`."""

    def __init__(
        self,
        rules: SchedulerRules,
        promises: Promises,
        context_of: Callable[[Any, str], KeyContext],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self.jobs = JobTable(rules.world_size, clock)
        self._rules = rules
        self._promises = promises
        self._context_of = context_of
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._new_loads: list[LoadPlan] = []
        self._names = itertools.count(1)
        self._told: set[str] = set()
        self._epoch = ""
        self._mixed = False  # vLLM could not reset its own prefix cache: what it reuses may be of before

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the engine's own `local_tokens` can be loaded, and whether asynchronously.

        None: ask later. Changes nothing but which lease the request has.
        """
        state, now = self._state(request), self._clock()
        self._renew_if_changed(state)
        if state.loading or now < state.ask_again_s:
            return None, False
        question = (request.num_tokens, local_tokens)
        if state.asked != question or now > state.asked_s + ANSWER_HOLDS_S:
            state.asked, state.asked_s, state.local_tokens = question, now, local_tokens
            state.answer = self._ask(state)
        return state.answer, bool(state.answer)

    def allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has given the request blocks, and loads `num_tokens` of what was matched (0: nothing)."""
        state = self._state(request)
        state.asked = None
        if num_tokens == 0:
            self._give_back(state)
            return
        lease = state.offer
        covered = state.local_tokens + num_tokens
        if covered != min(lease.tokens, request.num_tokens - 1):  # vLLM wants to stop short of what the lease fills
            self._give_back(state)
            lease = NO_OFFER  # which a worker fails, so that the tokens are computed
        blocks = tuple(block_ids[: num_blocks(covered, self._rules.block_size)])
        skip = state.local_tokens // self._rules.block_size
        job_id = self.jobs.begin_load(request.request_id, blocks[skip:], lease.lease_id)
        self._new_loads.append(
            LoadPlan(job_id, request.request_id, lease.lease_id, blocks, skip, self._rules.block_size)
        )
        self.counters.add("hit_tokens", num_tokens)
        state.loading, state.offer = True, NO_OFFER

    def plan(self, output: Any) -> StepPlan:
        """The step's work, for vLLM's SchedulerOutput."""
        stores = []
        for request_id, computed_tokens in scheduled(output, self._states):
            state = self._states.get(request_id)
            if state is not None and (store := self._store(request_id, state, computed_tokens)) is not None:
                stores.append(store)
        loads, self._new_loads = self._new_loads, []
        return StepPlan(tuple(loads), tuple(stores), idle=not output.total_num_scheduled_tokens)

    def ended(self, report: WorkReport) -> None:
        """Take in what the workers have ended, or given up."""
        for request_id in report.dropped:
            self._stop_load(self._states.get(request_id))
        for job in self.jobs.end(report):
            state = self._states.get(job.request_id)
            if job.is_load:
                self._end_load(state, job.lease_id, failed=job.failed)
            elif job.failed and state is not None:
                state.stores_allowed = False

    def finished(self, request: Any) -> None:
        """The request has ended, however."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._give_back(state)
            self._promises.forget(state.name)

    def expects_ends(self) -> bool:
        """Whether jobs should end soon, which only another step can find out."""
        age = self.jobs.youngest_s()
        return age is not None and age < SOON_S

    def frees_soon(self) -> bool:
        """Whether blocks that only jobs hold should be free very soon."""
        age = self.jobs.youngest_s(freeing=True)
        return age is not None and age < VERY_SOON_S

    def reset(self) -> bool:
        """Reuse nothing from before, since the weights may have changed; False where a load is going on.

        From here on this engine's keys are its own: nobody else knows these weights.
        """
        loading = self.jobs.any_load or bool(self._new_loads)
        self._epoch = secrets.token_hex(16)
        for state in self._states.values():
            self._renew(state)
        self._mixed = loading or self.jobs.blocks_in_use()
        if self._mixed:
            _LOG.warning("blocks are in use, so vLLM keeps KV of before: no KV is stored until a reset finds none")
        return not loading

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._promises.close()

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            state = RequestState(request, f"request-{next(self._names)}", self._context(request))
            state.inputs_changed()
            self._states[request.request_id] = state
        return state

    def _renew_if_changed(self, state: RequestState) -> None:
        """vLLM's sessions go on in the same request, with pictures of their own: all keys are others then."""
        if state.inputs_changed():
            self._renew(state)

    def _renew(self, state: RequestState) -> None:
        """Its keys are others from here on."""
        self._give_back(state)
        state.context = self._context(state.request)
        state.stored_tokens, state.asked = 0, None

    def _context(self, request: Any) -> KeyContext | None:
        try:
            return self._context_of(request, self._epoch)
        except NotExpressible as error:
            self.counters.add("unkeyed_requests")
            if str(error) not in self._told:
                self._told.add(str(error))
                _LOG.warning("requests with %s neither store nor reuse KV: no key can express it", error)
            return None

    def _ask(self, state: RequestState) -> int | None:
        """How many tokens of the server's are of use; the lease over them is the state's offer. None: ask again."""
        if not self._may_load(state):
            self._give_back(state)
            return 0
        request = state.request
        found = self._promises.lookup(state.name, state.tokens(request.num_tokens), state.context or KeyContext())
        if found is None:
            state.ask_again_s, state.asked = self._clock() + ASK_AGAIN_S, None
            return None
        self.counters.add("lookups")
        if not found.lease_id:
            self._give_back(state)
        state.offer = found
        if found.coming and self._may_wait(state):
            state.ask_again_s, state.asked = self._clock() + ASK_AGAIN_S, None
            return None
        state.give_up_s = None
        state.stored_tokens = found.tokens
        # The last token is always computed: it is what the next one is sampled from.
        useful = min(found.tokens, int(request.num_tokens) - 1) - state.local_tokens
        if useful >= self._rules.block_size:
            return useful
        self._give_back(state)
        return 0

    def _may_load(self, state: RequestState) -> bool:
        request = state.request
        return (
            self._rules.loads
            and state.context is not None
            and state.loads_allowed
            and not getattr(request, "skip_reading_prefix_cache", False)
            and state.local_tokens % self._rules.block_size == 0
            and request.num_tokens - 1 - state.local_tokens >= self._rules.block_size
            and request.num_tokens >= self._rules.chunk_tokens
        )

    def _may_wait(self, state: RequestState) -> bool:
        """Whether a request whose KV is still being read from a lower tier may wait for it."""
        if state.give_up_s is None:
            state.give_up_s = self._clock() + self._rules.disk_wait_s
        return self._clock() < state.give_up_s

    def _give_back(self, state: RequestState) -> None:
        offer, state.offer = state.offer, NO_OFFER
        self._promises.release(offer.lease_id)
        self._promises.withdraw(state.name)

    def _end_load(self, state: RequestState | None, lease_id: int, *, failed: bool) -> None:
        if failed:
            self._promises.release(lease_id)
            self._stop_load(state)
        elif state is not None:
            state.loading = False

    def _stop_load(self, state: RequestState | None) -> None:
        """A load of the request failed. vLLM asks again where none of it is left, and an equal answer would loop."""
        if state is not None:
            state.loading = state.loads_allowed = False
            state.stored_tokens, state.asked = 0, None

    def _store(self, request_id: str, state: RequestState, computed_tokens: int) -> StorePlan | None:
        """Store the chunks that are whole after this step, where any are new."""
        rules = self._rules
        self._renew_if_changed(state)
        if not rules.stores or state.context is None or not state.stores_allowed or self._mixed:
            return None
        committed = state.committed_tokens(computed_tokens, generated=rules.store_generated)
        until = whole_chunks(committed, rules.chunk_tokens)
        start = whole_chunks(state.stored_tokens, rules.chunk_tokens)
        if until <= start or not self._promises.usable:
            return None
        blocks = tuple(state.blocks[: until // rules.block_size])
        held = blocks[start // rules.block_size :]
        if not self.jobs.has_room(len(held)) or self.jobs.oldest_store_s() > STUCK_S:
            self.counters.add("stores_held_back")
            return None
        state.stored_tokens = until
        job_id = self.jobs.begin_store(request_id, held)
        return StorePlan(job_id, state.tokens(until).tobytes(), state.context, blocks, start)
