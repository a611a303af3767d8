"""What vLLM hands to a connector, in small; the interface itself is tested with the real vLLM (tests/vllm_engine)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.client import Job, Lookup, RetrieveResult, StoreResult
from kvferry.connectors.vllm.plans import StepPlan, WorkReport
from kvferry.connectors.vllm.scheduler import SchedulerRules, SchedulerSide
from kvferry.layout import KeyContext
from kvferry.protocol.messages import Retrieved, Stored


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """vLLM's BlockPool: blocks with counted references."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


@dataclass
class Request:
    """vLLM's Request, as far as it is looked at."""

    request_id: str
    prompt_token_ids: list[int] | None
    output_token_ids: list[int] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    status: str = "RUNNING"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Output:
    """vLLM's SchedulerOutput."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Server:
    """A server in name only: `there` is what it promises of any prompt. Notes leases that are out."""

    def __init__(self) -> None:
        self.there = 0
        self.coming = 0
        self.usable = True
        self.slow = False
        self.withdrawn: list[str] = []
        self.leases: set[int] = set()
        self.asked: list[tuple[str, int, KeyContext]] = []
        self.forgotten: list[str] = []
        self._by_name: dict[str, int] = {}

    def lookup(self, name: str, tokens: Sequence[int], context: KeyContext) -> Lookup | None:
        if self.slow:
            return None
        self.asked.append((name, len(tokens), context))
        if not self.there:
            return Lookup(0, 0, self.coming)
        lease = self._by_name.setdefault(name, len(self._by_name) + 1)
        self.leases.add(lease)
        return Lookup(self.there, lease, self.coming)

    def release(self, lease_id: int) -> None:
        if lease_id:
            self.leases.remove(lease_id)
            self._by_name = {name: lease for name, lease in self._by_name.items() if lease != lease_id}

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(name)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def close(self) -> None:
        self.usable = False


class Client:
    """Hands out real jobs, which the test ends."""

    def __init__(self) -> None:
        self.jobs: list[Job[Any]] = []
        self.cancelled = 0
        self.error: Exception | None = None
        self.closed = False
        self.congested = False

    def retrieve(self, lease_id: int, block_ids: Sequence[int], skip: int, *, timeout_s: float) -> Job[RetrieveResult]:
        return self._add(Job(block_ids[skip // 8 :], Retrieved))

    def store(self, tokens: Any, block_ids: Sequence[int], start: int, *, context: KeyContext) -> Job[StoreResult]:
        return self._add(Job(block_ids, Stored))

    def close(self) -> None:
        self.closed = True

    def _add(self, job: Job[Any]) -> Job[Any]:
        if self.error is not None:
            raise self.error
        job.bind(self._count_cancel)
        self.jobs.append(job)
        return job

    def _count_cancel(self) -> None:
        self.cancelled += 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A scheduler's side with blocks of 8 tokens and chunks of 64, and what it stands between."""

    def __init__(self, world_size: int = 1, num_blocks: int = 256, **rules: Any) -> None:
        self.server, self.pool, self.clock = Server(), Pool(num_blocks), Clock()
        made = SchedulerRules(block_size=8, chunk_tokens=64, world_size=world_size, **rules)
        self.side = SchedulerSide(made, self.server, self.context, clock=self.clock)  # type: ignore[arg-type]
        self.side.jobs.bind(self.pool)

    @staticmethod
    def context(request: Any, epoch: str) -> KeyContext:
        return KeyContext(salt=epoch)

    def first_step(self, request: Request, *, computed: int = 0, scheduled: int, blocks: Sequence[int]) -> StepPlan:
        """The plan of a step that has the request for the first time."""
        new = New(request.request_id, (list(blocks),), computed)
        return self.side.plan(Output([new], num_scheduled_tokens={request.request_id: scheduled}))

    def next_step(
        self, request: Request, *, computed: int, scheduled: int, new_blocks: Sequence[int] | None = None
    ) -> StepPlan:
        """The plan of a step that goes on with the request."""
        added = None if new_blocks is None else (list(new_blocks),)
        cached = Cached([request.request_id], [added], [computed])
        return self.side.plan(Output([], cached, {request.request_id: scheduled}))

    def end(self, *job_ids: int, failed: bool = False) -> None:
        """All ranks but one report nothing; call it once a rank."""
        report = WorkReport()
        for job_id in job_ids:
            report.add(job_id, failed=failed)
        self.side.ended(report)
