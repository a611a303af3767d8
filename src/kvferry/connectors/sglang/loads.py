"""Loads into device slots: queued by request, started by batch, waited for by the forward."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.client import CacheClient, Job, RetrieveResult
from kvferry.connectors.sglang.questions import Questions, Run
from kvferry.errors import DeadlineError, KVFerryError

GRACE_S = 1.0  # beyond the time-out, for the server to fail the load by itself
_TELL_S = 10.0
_MAX_STAGES = 16
_LOG = logging.getLogger("sglang.kvferry")


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """Pages `block_ids` of the device for the pages of `runs`; without `runs` the load has failed already."""

    runs: list[Run] | None
    block_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class _Batch:
    loads: list[QueuedLoad]
    jobs: list[Job[RetrieveResult]] = field(default_factory=list)
    begun_s: float = 0.0
    failed: bool = False


class Loads:
    """The loads of one rank, and the counter by which SGLang's forward waits for them. The scheduler's thread.

    Each goes in stages of some layers, so that the forward is at the first ones while the others are still coming; all
    at once where `num_layers` is 1.

    SGLang frees the slots of a load that has failed at once, so that nothing may be written there any more when it is
    told. A server that is alive and does not say that it has stopped is therefore waited for, for as long as it takes.
    """

    def __init__(
        self,
        client: CacheClient,
        questions: Questions,
        *,
        num_layers: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._questions = questions
        self.num_layers = num_layers  # SGLang asks for the last one before it replays a graph of the whole forward
        self._timeout_s = timeout_s
        self._clock = clock
        self._queued: dict[str, QueuedLoad] = {}
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self.consumer_index = -1

    def queue(self, rid: str, load: QueuedLoad) -> None:
        """Have it started with the next batch. Raises RuntimeError for a request that has one queued."""
        if rid in self._queued:
            raise RuntimeError(f"a load of request {rid} is queued already")
        self._queued[rid] = load

    def cancel(self, rid: str) -> bool:
        """Take back a load that has not started; whether there was one."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        self._questions.give_back(load.runs or [])
        return True

    def start(self, stream: Callable[[], int | None]) -> int:
        """Start what is queued; the number of the batch, -1 where there is nothing.

        The server writes once the work that `stream()`, a CUDA stream's handle, has now is done.
        """
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        batch = _Batch(loads, begun_s=self._clock())
        number, self._next = self._next, self._next + 1
        self._batches[number] = batch
        handle = stream()
        for load in loads:
            self._start_one(batch, load, handle)
        return number

    def set_consumer(self, index: int) -> None:
        """The forward that comes next uses the loads of this batch."""
        self.consumer_index = index

    def update_producer(self) -> int:
        """The number of the batch that comes next."""
        return self._next

    def wait_until(self, layer: int) -> None:
        """Return when all layers up to this one are in place for the forward's batch, or what is not has failed."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            self._settle(batch, layer + 1)

    def finish(self, number: int) -> bool:
        """Whether all loads of a batch went well; nothing of it is written any more. The batch is forgotten."""
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        self._settle(batch, self.num_layers)
        for load in batch.loads:
            self._questions.give_back(load.runs or [])
        return not batch.failed

    def reset(self) -> None:
        """Take back what is queued, and see the rest through."""
        for rid in list(self._queued):
            self.cancel(rid)
        for number in list(self._batches):
            self.finish(number)
        self.consumer_index = -1

    def _start_one(self, batch: _Batch, load: QueuedLoad, stream: int | None) -> None:
        if load.runs is None:
            batch.failed = True
            return
        for run in load.runs:
            wanted = [0] * run.skip + list(load.block_ids[run.start : run.start + run.num_pages])
            skip_tokens = run.skip * self._client.chunk_tokens
            try:
                job = self._client.retrieve(
                    run.lease_id,
                    wanted,
                    skip_tokens,
                    stream=stream,
                    timeout_s=self._timeout_s,
                    stages=min(self.num_layers, _MAX_STAGES),
                )
            except (KVFerryError, ValueError) as error:
                self._fail(batch, error)
                return
            batch.jobs.append(job)

    def _settle(self, batch: _Batch, num_layers: int) -> None:
        """Return when the first `num_layers` are in place in all of the batch; what fails has stopped."""
        for job in batch.jobs:
            count = -(-num_layers * job.stages // self.num_layers)  # the last of them may begin in the stage before
            try:
                job.wait_stages(count, max(0.0, batch.begun_s + self._timeout_s + GRACE_S - self._clock()))
            except KVFerryError as error:
                self._stop(job)
                self._fail(batch, error)

    def _stop(self, job: Job[RetrieveResult]) -> None:
        """Return when nothing is written any more."""
        waited_s = 0.0
        while not job.done():
            with contextlib.suppress(DeadlineError):
                job.cancel(_TELL_S)
            if not job.done():
                waited_s += _TELL_S
                _LOG.error(
                    "the cache server is alive and has not stopped a load after %.0f s: its slots cannot be given to "
                    "another request, so this engine waits until the server goes on, or is ended",
                    waited_s,
                )

    def _fail(self, batch: _Batch, error: Exception) -> None:
        if isinstance(error, DeadlineError):
            self._questions.pause()
        if not batch.failed:
            _LOG.warning("a load failed, so its requests are aborted: %s", error)
        batch.failed = True
