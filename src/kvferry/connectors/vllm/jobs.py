"""The jobs that the workers have been given and have not all ended, and the blocks that are theirs until then."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.vllm.plans import WorkReport

# How much of the engine's cache stores may keep from being used again, so that a slow server does not starve it.
HELD_SHARE = 0.25


@dataclass(slots=True, eq=False)
class ScheduledJob:
    """A load or a store of one request. `lease_id` is 0 for a store; `held` are vLLM's own block objects."""

    request_id: str
    is_load: bool
    lease_id: int
    held: list[Any]
    ranks_left: int
    begun_s: float
    failed: bool = False


class JobTable:
    """Jobs by id. Each holds references to its blocks, so that nobody else gets them before it has ended.

    Preempted, aborted and finished requests thus need no waiting: whatever becomes of them, a block that the server
    still reads or writes is not free.
    """

    def __init__(self, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._world_size = world_size
        self._clock = clock
        self._pool: Any = None
        self._jobs: dict[int, ScheduledJob] = {}
        self._ids = itertools.count(1)
        self._num_held = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def bind(self, pool: Any) -> None:
        """vLLM's BlockPool: `touch` adds a reference to each block, `free_blocks` drops one."""
        self._pool = pool

    def begin_store(self, request_id: str, block_ids: Sequence[int]) -> int:
        """The id of a new store, which reads blocks that the request has now."""
        return self._begin(request_id, block_ids, is_load=False, lease_id=0)

    def begin_load(self, request_id: str, block_ids: Sequence[int], lease_id: int) -> int:
        """The id of a new load, which writes to blocks that the request has now."""
        return self._begin(request_id, block_ids, is_load=True, lease_id=lease_id)

    @property
    def any_load(self) -> bool:
        """Whether a load is going on."""
        return any(job.is_load for job in self._jobs.values())

    def end(self, report: WorkReport) -> list[ScheduledJob]:
        """Take in what the workers report; the jobs that all ranks have ended."""
        ended = []
        for job_id, end in report.ended.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.failed |= end.failed
            job.ranks_left -= end.num_ranks
            if job.ranks_left <= 0:
                del self._jobs[job_id]
                self._num_held -= len(job.held)
                self._pool.free_blocks(list(reversed(job.held)))
                ended.append(job)
        return ended

    def blocks_in_use(self) -> bool:
        """Whether anybody uses any block, a job or a request; vLLM's own prefix cache cannot be reset then."""
        return any(block.ref_cnt for block in self._pool.blocks if not block.is_null)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a store may keep so many blocks more; one may always."""
        return not self._num_held or self._num_held + num_blocks <= len(self._pool.blocks) * HELD_SHARE

    def oldest_store_s(self) -> float:
        """How long ago the oldest store was begun; 0 without any."""
        times = (job.begun_s for job in self._jobs.values() if not job.is_load)  # in the order of their beginning
        return self._clock() - next(times, self._clock())

    def youngest_s(self, *, freeing: bool = False) -> float | None:
        """How long ago the last job was begun (with `freeing`, the last whose end frees a block); None without any."""
        times = (
            job.begun_s
            for job in reversed(self._jobs.values())  # vLLM asks at every step, mostly for the first of these
            if not freeing or any(block.ref_cnt == 1 for block in job.held)
        )
        begun_s = next(times, None)
        return None if begun_s is None else self._clock() - begun_s

    def _begin(self, request_id: str, block_ids: Sequence[int], *, is_load: bool, lease_id: int) -> int:
        held = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(held)
        self._num_held += len(held)
        job_id = next(self._ids)
        self._jobs[job_id] = ScheduledJob(request_id, is_load, lease_id, held, self._world_size, self._clock())
        return job_id
