"""What the scheduler side tells the workers each step, and what they tell back. Plain data, which vLLM sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.layout import KeyContext


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Fill the blocks of a lease. `block_ids` are those of all promised tokens; the first `skip_blocks` are there."""

    job_id: int
    request_id: str
    lease_id: int
    block_ids: tuple[int, ...]
    skip_blocks: int
    block_size: int

    @property
    def target_ids(self) -> tuple[int, ...]:
        """The blocks to fill."""
        return self.block_ids[self.skip_blocks :]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Keep the chunks of `tokens` (int32, little-endian) from `start_token` on; `block_ids` are those of all tokens."""

    job_id: int
    tokens: bytes
    context: KeyContext
    block_ids: tuple[int, ...]
    start_token: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work; `idle` where the step computes nothing, so that a worker may wait a moment for its jobs."""

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class JobEnd:
    """So many ranks have ended a job; it counts as failed where one of them failed."""

    num_ranks: int
    failed: bool


@dataclass(slots=True)
class WorkReport:
    """What happened since the last report: jobs that ended, and requests whose loads were given up unended."""

    ended: dict[int, JobEnd] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.ended or self.dropped)

    def add(self, job_id: int, *, failed: bool, num_ranks: int = 1) -> None:
        """Count ranks that ended a job."""
        known = self.ended.get(job_id, JobEnd(0, False))
        self.ended[job_id] = JobEnd(known.num_ranks + num_ranks, known.failed or failed)

    def aggregate(self, other: WorkReport) -> WorkReport:
        """Both reports in one; vLLM calls it over the reports of all ranks."""
        for job_id, end in other.ended.items():
            self.add(job_id, failed=end.failed, num_ranks=end.num_ranks)
        self.dropped |= other.dropped
        return self
