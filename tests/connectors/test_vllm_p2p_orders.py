"""Whatever order vLLM's calls come in: right KV is sent, filled blocks are the request's, and nothing stays behind.

The model is an engine of both roles in small. It knows what KV each block holds, so that it sees blocks that somebody
else was given too early.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connectors.vllm_doubles import Block, Cached, Clock, New, Output, Pool, Request
from kvferry.connectors.vllm.p2p.handover import Part
from kvferry.connectors.vllm.p2p.plans import ReceivePlan, SendPlan
from kvferry.connectors.vllm.p2p.scheduler import PeerScheduler
from kvferry.connectors.vllm.plans import WorkReport

BLOCK, RANKS, POOL, CHUNK = 4, 2, 12, 6
THEIRS = ["127.0.0.1:8000", "127.0.0.1:8001"]
OWN = ("127.0.0.1:7000", "127.0.0.1:7001")
PICK = st.integers(0, 1000)


@dataclass(eq=False)
class Living:
    """A request as vLLM has it: it `waits`, also for remote KV (`remote`), or runs; `gone` is one that has ended."""

    request: Request
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    waits: bool = True
    remote: bool = False
    preempted: bool = False
    gone: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@dataclass(eq=False)
class Job:
    """What the workers do: `kv` is what its blocks hold, or are to hold."""

    plan: SendPlan | ReceivePlan
    kv: dict[int, Any]
    waiting: Living | None
    ranks_left: int = RANKS
    failed: bool = False


class Orders(RuleBasedStateMachine):
    """Requests come, are admitted, preempted, aborted; transfers end, fail and are given up, rank by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(POOL)
        self.side = PeerScheduler(BLOCK, Part(sends=True, receives=True, get=False, tp_size=RANKS), clock=Clock())
        self.side.jobs.bind(self.pool)
        self.side.own_addresses = OWN
        self.kv: dict[int, Any] = {}
        self.living: list[Living] = []
        self.jobs: dict[int, Job] = {}
        self.transfers: set[str] = set()
        self.count = 0

    @rule(kind=st.sampled_from(["send", "receive", "own"]), length=st.integers(1, 20), shared=st.booleans())
    def arrives(self, kind: str, length: int, shared: bool) -> None:
        self.count += 1
        params: dict[str, Any] | None = {"transfer_id": "s" if shared else f"t{self.count}", "remote_addresses": THEIRS}
        if kind == "own":
            params = None
        else:
            params = {**(params or {}), f"do_remote_{'decode' if kind == 'send' else 'prefill'}": True}
        prompt = [self.count] * length
        self.living.append(Living(Request(f"r{self.count}", prompt, kv_transfer_params=params)))

    @rule(admit=st.lists(st.tuples(PICK, st.integers(0, 4)), max_size=3))
    def steps(self, admit: list[tuple[int, int]]) -> None:
        """One step: some requests are admitted, those that run go on, and the workers do what is planned."""
        output = Output()
        for one in [one for one in self.living if not one.waits]:
            self._go_on(one, output)
        for pick, hit in admit:
            waiting = [one for one in self.living if one.waits and not one.remote]
            if waiting:
                self._admit(waiting[pick % len(waiting)], hit, output)
        plan = self.side.plan(output)
        for one in self.living:
            if one.name in output.num_scheduled_tokens:
                self._compute(one, output.num_scheduled_tokens[one.name])
        for receive in plan.receives:
            waiter = next(one for one in self.living if one.name == receive.request_id)
            self.jobs[receive.job_id] = Job(receive, _wanted(receive, waiter), waiter)
        for send in plan.sends:
            self._begin_send(send)

    @rule(pick=PICK, fails=st.booleans())
    def a_rank_ends(self, pick: int, fails: bool) -> None:
        if not self.jobs:
            return
        job_id = list(self.jobs)[pick % len(self.jobs)]
        job = self.jobs[job_id]
        job.failed |= fails
        job.ranks_left -= 1
        report = WorkReport()
        report.add(job_id, failed=fails)
        if not job.ranks_left:
            del self.jobs[job_id]
            if isinstance(job.plan, ReceivePlan) and not job.failed:
                self.kv.update(job.kv)
        self.side.ended(report)
        if not job.ranks_left and isinstance(job.plan, ReceivePlan) and job.waiting is not None:
            self._received(job.waiting, failed=job.failed)

    @rule(pick=PICK)
    def a_load_is_given_up(self, pick: int) -> None:
        """It has not stopped: vLLM takes the blocks from the request, which the job still holds."""
        loads = [job for job in self.jobs.values() if isinstance(job.plan, ReceivePlan) and job.waiting is not None]
        if loads:
            job = loads[pick % len(loads)]
            assert job.waiting is not None
            self.side.ended(WorkReport(dropped={job.waiting.name}))
            self._received(job.waiting, failed=True)
            job.waiting = None

    @rule(pick=PICK)
    def is_preempted(self, pick: int) -> None:
        running = [one for one in self.living if not one.waits]
        if running:
            one = running[pick % len(running)]
            self._free(one)
            one.waits = one.preempted = True

    @rule(pick=PICK, status=st.sampled_from(["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_STOPPED"]))
    def ends(self, pick: int, status: str) -> None:
        """Aborted at any time; finished once it has run."""
        able = [one for one in self.living if status == "FINISHED_ABORTED" or not one.waits]
        able = [one for one in able if not one.gone]
        if able:
            one = able[pick % len(able)]
            one.request.status, one.gone = status, True
            self.side.finished(one.request)
            if not one.remote:  # else vLLM keeps its blocks until the worker says that the load is over
                self._free(one)
                self.living.remove(one)

    @invariant()
    def what_is_sent_stays_as_it_was(self) -> None:
        for job in self.jobs.values():
            if isinstance(job.plan, SendPlan):
                assert {block: self.kv.get(block) for block in job.kv} == job.kv

    @invariant()
    def nothing_stays_behind(self) -> None:
        names = {one.name for one in self.living} | {job.waiting.name for job in self.jobs.values() if job.waiting}
        open_ones = {name for name, state in self.side._states.items() if state is not None and not state.ended}
        assert open_ones <= names
        assert len(self.side._states) <= len(self.living) + len(self.jobs)
        assert len(self.side._live) <= len(self.living) + len(self.jobs)
        assert len(self.side.jobs) == len(self.jobs)
        if not self.living and not self.jobs:
            assert not self.pool.held()
            assert not self.side._states
            assert not self.side._live

    def _begin_send(self, send: SendPlan) -> None:
        """All of it is computed when the step is over, once a request."""
        assert send.handover.transfer_id not in self.transfers or send.handover.transfer_id == "s"
        self.transfers.add(send.handover.transfer_id)
        (one,) = [one for one in self.living if send.block_ids == tuple(one.ids[: len(send.block_ids)]) and one.ids]
        assert one.computed >= one.request.num_prompt_tokens - 1 > (len(send.block_ids) - 1) * BLOCK
        kv = {block: (one.name, place) for place, block in enumerate(send.block_ids)}
        assert {block: self.kv.get(block) for block in kv} == kv
        self.jobs[send.job_id] = Job(send, kv, None)

    def _admit(self, one: Living, hit: int, output: Output) -> None:
        request = one.request
        if one.computed:  # its KV has come
            if self._grow(one, one.computed + 1):
                self.side.allocated(request, one.ids, 0)
                self._schedule(one, output)
            return
        local = min(hit, (request.num_prompt_tokens - 1) // BLOCK) * BLOCK
        found = [self.side.matched(request, local) for _ in range(2)]
        assert found[0] == found[1]
        count, is_async = found[0]
        if count is None:
            return
        assert local + count <= request.num_prompt_tokens
        if not self._grow(one, local + (count or 1)):
            return
        for place in range(local // BLOCK):
            self._write(one, place)
        self.side.allocated(request, one.ids, count)
        if is_async:
            one.remote, one.computed = True, local + count
        else:
            one.computed = local
            self._schedule(one, output)

    def _schedule(self, one: Living, output: Output) -> None:
        """For the first time, or again after it was preempted."""
        if one.preempted:
            output.scheduled_cached_reqs.resumed_req_ids.add(one.name)
            self._tell_cached(one, one.ids, output)
        else:
            output.scheduled_new_reqs.append(New(one.name, (one.ids,), one.computed))
        one.waits = one.preempted = False
        output.num_scheduled_tokens[one.name] = min(CHUNK, len(one.blocks) * BLOCK - one.computed)

    def _go_on(self, one: Living, output: Output) -> None:
        known = len(one.blocks)
        if self._grow(one, one.computed + CHUNK):
            self._tell_cached(one, one.ids[known:] or None, output)
            output.num_scheduled_tokens[one.name] = CHUNK

    def _tell_cached(self, one: Living, blocks: list[int] | None, output: Output) -> None:
        cached: Cached = output.scheduled_cached_reqs
        cached.req_ids.append(one.name)
        cached.new_block_ids.append(None if blocks is None else (blocks,))
        cached.num_computed_tokens.append(one.computed)

    def _compute(self, one: Living, count: int) -> None:
        for place in range(one.computed // BLOCK):
            assert self.kv[one.ids[place]] == (one.name, place)
        for place in range(one.computed // BLOCK, -(-(one.computed + count) // BLOCK)):
            if place < len(one.blocks):
                self._write(one, place)
        one.computed += count

    def _write(self, one: Living, place: int) -> None:
        block = one.ids[place]
        assert not any(block in job.kv for job in self.jobs.values() if isinstance(job.plan, ReceivePlan))
        self.kv[block] = (one.name, place)

    def _received(self, one: Living, *, failed: bool) -> None:
        one.remote = False
        if failed or one.gone:
            self._free(one)
        if one.gone:
            self.living.remove(one)

    def _grow(self, one: Living, tokens: int) -> bool:
        """Blocks for so many tokens; none where there are not enough."""
        wanted = -(-tokens // BLOCK) - len(one.blocks)
        free = [block for block in self.pool.blocks if not block.ref_cnt]
        if wanted > len(free):
            return False
        fresh = free[: max(0, wanted)]
        self.pool.touch(fresh)
        for block in fresh:
            self.kv.pop(block.block_id, None)
        one.blocks += fresh
        return True

    def _free(self, one: Living) -> None:
        self.pool.free_blocks(one.blocks)
        one.blocks, one.computed = [], 0


def _wanted(receive: ReceivePlan, waiter: Living) -> dict[int, Any]:
    """What its blocks hold when it has come: all that the engine did not have itself."""
    first = receive.skip_blocks
    assert tuple(waiter.ids[first:]) == receive.block_ids
    return {block: (waiter.name, first + place) for place, block in enumerate(receive.block_ids)}


Orders.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestOrders = Orders.TestCase
