"""The scheduler's side: which requests' KV is sent, and which requests wait for theirs."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.vllm.counters import P2P_COUNTERS, Counters
from kvferry.connectors.vllm.jobs import JobTable
from kvferry.connectors.vllm.p2p.handover import Handover, HandoverError, Part, answer, handover_of
from kvferry.connectors.vllm.p2p.plans import PeerPlan, ReceivePlan, SendPlan
from kvferry.connectors.vllm.p2p.tags import tag_of
from kvferry.connectors.vllm.plans import WorkReport
from kvferry.connectors.vllm.requests import num_blocks
from kvferry.connectors.vllm.steps import scheduled

# How long vLLM is asked to wait, instead of preempting, for transfers that must end soon.
VERY_SOON_S = 0.5
_BROKEN = ("ABORT", "ERROR", "IGNORED")
_LOG = logging.getLogger("vllm.kvferry")


class Phase(enum.Enum):
    """How far a request's transfer has come. There is one a request, however it ends."""

    TO_COME = "to come"
    UNDER_WAY = "under way"
    OVER = "over"


@dataclass(slots=True, eq=False)
class _Peered:
    """A request that takes part in a transfer, until both have ended."""

    request: Any
    handover: Handover
    blocks: list[int] = field(default_factory=list)
    phase: Phase = Phase.TO_COME
    job_id: int = 0
    ended: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV goes over. The last one's does not: what comes after it is sampled from computing it."""
        return int(self.request.num_prompt_tokens) - 1


class PeerScheduler:
    """Plans transfers. One thread, vLLM's scheduler's, which waits for nothing here.

    Blocks that are sent or filled are held by the job, so whatever becomes of the request (it ends, is aborted, is
    preempted) nobody else gets them before all ranks have said that the transfer has ended.

    Nothing happens before `own_addresses` are known, which are those of all ranks: without them no rank has an engine.
    """

    def __init__(self, block_size: int, part: Part, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counters(P2P_COUNTERS)
        self.jobs = JobTable(part.tp_size, clock)
        self.own_addresses: tuple[str, ...] = ()
        self._block_size = block_size
        self._part = part
        self._states: dict[str, _Peered | None] = {}
        self._live: dict[tuple[str, bool], str] = {}
        self._receives: list[ReceivePlan] = []
        self._cancelled: list[int] = []
        self._dropped: list[Handover] = []
        self._told: set[str] = set()

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the engine's own `local_tokens` will come, asynchronously. Changes nothing."""
        state = self._state(request)
        if state is None or state.handover.sends or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if state.phase is Phase.UNDER_WAY:
            return None, False
        count = state.num_tokens - local_tokens
        if state.phase is Phase.OVER or count <= 0 or local_tokens % self._block_size:
            return 0, False
        return count, True

    def allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has given the request blocks, and waits for `num_tokens` of what was matched (0: for nothing)."""
        state = self._state(request)
        if state is None or state.handover.sends or state.phase is not Phase.TO_COME:
            return
        if num_tokens == 0:
            if state.num_tokens > 0:  # the engine has all of it itself, or another connector loads
                self._drop(state)
            state.phase = Phase.OVER
            return
        total = num_blocks(state.num_tokens, self._block_size)
        skip, rest = divmod(max(0, state.num_tokens - num_tokens), self._block_size)
        fits = rest == 0 and num_tokens <= state.num_tokens and len(block_ids) >= total
        targets = tuple(block_ids[skip:total])
        state.phase, state.job_id = Phase.UNDER_WAY, self.jobs.begin_load(request.request_id, targets, 0)
        wanted = state.handover if fits else None
        tag = tag_of(request)
        self._receives.append(ReceivePlan(state.job_id, request.request_id, wanted, targets, skip, tag))
        self.counters.add("p2p_received_tokens", num_tokens)

    def plan(self, output: Any) -> PeerPlan:
        """The step's work, for vLLM's SchedulerOutput."""
        peered = {name: state for name, state in self._states.items() if state is not None}
        sends = []
        for request_id, computed_tokens in scheduled(output, peered):
            state = peered.get(request_id)
            if state is not None and state.handover.sends and state.phase is Phase.TO_COME:
                sends += self._send(request_id, state, computed_tokens)
        receives, self._receives = self._receives, []
        cancelled, self._cancelled = self._cancelled, []
        dropped, self._dropped = self._dropped, []
        idle = not output.total_num_scheduled_tokens
        return PeerPlan(tuple(sends), tuple(receives), tuple(cancelled), tuple(dropped), idle)

    def ended(self, report: WorkReport) -> None:
        """Take in what the workers have ended, or given up."""
        for job in self.jobs.end(report):
            state = self._states.get(job.request_id)
            if state is not None:
                state.phase = Phase.OVER
                self._forget(job.request_id, state)
        for request_id in report.dropped:
            state = self._states.get(request_id)
            if state is not None:
                state.phase = Phase.OVER

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended, however; what its response is to carry."""
        state = self._state(request)
        if state is None:
            self._states.pop(request.request_id, None)
            return None
        state.ended = True
        sent = state.handover.sends and not any(word in str(request.status) for word in _BROKEN)
        if state.phase is Phase.TO_COME:
            self._drop(state)
            sent = False
        elif state.phase is Phase.UNDER_WAY and not sent:
            self._cancelled.append(state.job_id)
        self._forget(request.request_id, state)
        return answer(state.handover, self.own_addresses) if sent else None

    def expects_ends(self) -> bool:
        """Whether there is something that only another step can find out, or tell the workers."""
        return bool(len(self.jobs) or self._cancelled or self._dropped)

    def frees_soon(self) -> bool:
        """Whether blocks that only transfers hold should be free very soon."""
        age = self.jobs.youngest_s(freeing=True)
        return age is not None and age < VERY_SOON_S

    def _state(self, request: Any) -> _Peered | None:
        """What is known of a request; None where it takes part in no transfer."""
        request_id = request.request_id
        if request_id not in self._states:
            self._states[request_id] = self._new_state(request)
        return self._states[request_id]

    def _new_state(self, request: Any) -> _Peered | None:
        if not self.own_addresses:
            return None
        own = self.own_addresses[0]
        try:
            handover = handover_of(request.kv_transfer_params, request.request_id, self._part, own)
            if handover is None:
                return None
            if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
                raise HandoverError("a prompt of embeddings is not handed over")
            key = (handover.transfer_id, handover.sends)
            if key in self._live:
                raise HandoverError(f"transfer {handover.transfer_id!r:.80} is another live request's, too: n > 1?")
        except HandoverError as error:
            self._refuse(str(error))
            return None
        self._live[key] = request.request_id
        return _Peered(request, handover)

    def _refuse(self, why: str) -> None:
        self.counters.add("p2p_refused")
        if why not in self._told and len(self._told) < 100:  # each may hold what a client made up
            self._told.add(why)
            _LOG.warning("a request's KV is not handed over, its tokens are computed: %s", why)

    def _send(self, request_id: str, state: _Peered, computed_tokens: int) -> list[SendPlan]:
        """Send once all of the tokens are computed after this step."""
        if computed_tokens < state.num_tokens:
            return []
        blocks = tuple(state.blocks[: num_blocks(state.num_tokens, self._block_size)])
        if not blocks:  # a prompt of one token
            state.phase = Phase.OVER
            return []
        state.phase, state.job_id = Phase.UNDER_WAY, self.jobs.begin_store(request_id, blocks)
        return [SendPlan(state.job_id, state.handover, blocks, tag_of(state.request))]

    def _drop(self, state: _Peered) -> None:
        """It will not be sent, or is not wanted; the other engine is told, where there was something to tell of."""
        state.phase = Phase.OVER
        # Where vLLM rejects a request it makes one with another prompt in its place, so the decode side always tells.
        if state.num_tokens > 0 or not state.handover.sends:
            self._dropped.append(state.handover)
            self.counters.add("p2p_withdrawn" if state.handover.sends else "p2p_not_taken")

    def _forget(self, request_id: str, state: _Peered) -> None:
        if state.ended and state.phase is not Phase.UNDER_WAY:
            del self._states[request_id]
            self._live.pop((state.handover.transfer_id, state.handover.sends), None)
