"""A worker's side: starts the jobs that the scheduler side planned, and finds out how they end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from kvferry.client import CacheClient, Job, RetrieveResult, StoreResult
from kvferry.connectors.vllm.counters import Counters
from kvferry.connectors.vllm.outcomes import Outcomes
from kvferry.connectors.vllm.plans import LoadPlan, StepPlan, StorePlan
from kvferry.errors import DeadlineError, KVFerryError, RequestError, ServerGoneError

# In a step that computes nothing a worker waits so long for a job, which costs less than vLLM's stepping in a circle.
IDLE_WAIT_S = 0.002
# Beyond the time-out: for the server to fail the load by itself, and to say that a cancelled one writes nothing more.
GRACE_S = 1.0
# At one time. A client has 64 events, and would wait for one; what is begun later is all the same done in time, since
# its blocks are held until then.
MAX_JOBS, MAX_STORES = 56, 40
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(slots=True, eq=False)
class _Load:
    plan: LoadPlan
    job: Job[RetrieveResult]
    begun_s: float
    cancelled: bool = False
    given_up: bool = False


@dataclass(slots=True, eq=False)
class _Store:
    plan: StorePlan
    job: Job[StoreResult]


class WorkerSide(Outcomes):
    """The jobs of one rank. One thread, vLLM's; nothing waits for the server but a moment in an idle step.

    Where the server does not confirm that a load is stopped, the request is computed in other blocks, and the old ones
    stay out of use until it has ended. vLLM takes all blocks from a request where none of them is good, or where
    `can_drop_loads`, because of which releases without that have such a request wait if it has good blocks of its own.
    """

    def __init__(
        self,
        client: CacheClient | None,
        *,
        load_timeout_s: float,
        can_drop_loads: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.counters = Counters()
        self._client = client
        self._load_timeout_s = load_timeout_s
        self._can_drop_loads = can_drop_loads
        self._clock = clock
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._loads_to_begin: deque[tuple[float, LoadPlan]] = deque()  # each with the time when it came
        self._stores_to_begin: deque[tuple[float, StorePlan]] = deque()
        self._told: set[str] = set()

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the step's loads; the server writes once the work that was queued so far is done."""
        self._loads_to_begin.extend((self._clock(), load) for load in plan.loads)
        self._begin()

    def start_stores(self, plan: StepPlan) -> None:
        """Begin the step's stores; the server reads once the work that was queued so far is done."""
        self._stores_to_begin.extend((self._clock(), store) for store in plan.stores)
        self._begin()

    def poll(self, *, idle: bool) -> None:
        """See which jobs have ended. In an `idle` step a moment is spent on waiting for one."""
        if idle and (waiting := self._awaited()) is not None:
            with contextlib.suppress(KVFerryError):
                waiting.wait(IDLE_WAIT_S)
        self._loads = [load for load in self._loads if not self._end_load(load)]
        self._stores = [store for store in self._stores if not self._end_store(store)]
        self._begin()
        self._fail_unbegun(self._clock() - self._load_timeout_s, "earlier jobs have not ended")

    def use(self, client: CacheClient | None) -> None:
        """Go on with another client, or without; the server has let go of the blocks on return, or is gone."""
        former, self._client = self._client, client
        if former is not None:
            former.close()
        self._fail_unbegun(self._clock(), "the KV cache is no longer registered")

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.use(None)

    @property
    def _num_jobs(self) -> int:
        return len(self._loads) + len(self._stores)

    def _begin(self) -> None:
        """Begin what waits, as far as there is room, and the server reads what it is sent."""
        while self._loads_to_begin and self._num_jobs < MAX_JOBS and self._can_send():
            self._begin_load(self._loads_to_begin.popleft()[1])
        while self._stores_to_begin and self._num_jobs < MAX_JOBS and len(self._stores) < MAX_STORES:
            if not self._can_send():
                return
            self._begin_store(self._stores_to_begin.popleft()[1])

    def _can_send(self) -> bool:
        """Whether a job would be sent at once, or fail at once. A hung server would keep vLLM's thread else."""
        return self._client is None or not self._client.congested

    def _begin_load(self, load: LoadPlan) -> None:
        try:
            if load.lease_id == 0:
                raise RequestError("lease", "vLLM loads other tokens than were promised")
            skip_tokens = load.skip_blocks * load.block_size
            job = self._connected().retrieve(load.lease_id, load.block_ids, skip_tokens, timeout_s=self._load_timeout_s)
        except (KVFerryError, ValueError) as error:
            self._fail_load(load, _as_ours(error), load.target_ids)
        else:
            self._loads.append(_Load(load, job, self._clock()))

    def _begin_store(self, store: StorePlan) -> None:
        tokens = np.frombuffer(store.tokens, dtype="<i4")
        try:
            job = self._connected().store(tokens, store.block_ids, store.start_token, context=store.context)
        except (KVFerryError, ValueError) as error:
            self._fail_store(store, _as_ours(error))
        else:
            self._stores.append(_Store(store, job))

    def _fail_unbegun(self, until_s: float, why: str) -> None:
        """Fail what came before `until_s` and could not begin yet: the server has not heard of it."""
        while self._loads_to_begin and self._loads_to_begin[0][0] <= until_s:
            load = self._loads_to_begin.popleft()[1]
            self._fail_load(load, DeadlineError(why), load.target_ids)
        while self._stores_to_begin and self._stores_to_begin[0][0] <= until_s:
            self._fail_store(self._stores_to_begin.popleft()[1], DeadlineError(why))

    def _connected(self) -> CacheClient:
        if self._client is None:
            raise ServerGoneError("this rank's KV cache is not registered")
        return self._client

    def _awaited(self) -> Job[RetrieveResult] | Job[StoreResult] | None:
        for load in self._loads:
            if not load.given_up:
                return load.job
        return self._stores[0].job if self._stores else None

    def _end_load(self, load: _Load) -> bool:
        """Whether the load's job has ended; a load that takes too long is stopped."""
        job, age_s = load.job, self._clock() - load.begun_s
        if not job.done():
            if age_s > self._load_timeout_s + GRACE_S and not load.cancelled and self._can_send():
                load.cancelled = True
                with contextlib.suppress(KVFerryError):
                    job.cancel(timeout_s=0.0)
            droppable = self._can_drop_loads or load.plan.skip_blocks == 0
            if age_s > self._load_timeout_s + 2 * GRACE_S and droppable and not load.given_up:
                self._give_up(load)
            return False
        if load.given_up:
            self._report.add(load.plan.job_id, failed=True)
        elif job.error is not None:
            self._fail_load(load.plan, job.error, job.failed_block_ids)
        else:
            self._received.add(load.plan.request_id)
            self._report.add(load.plan.job_id, failed=False)
            self.counters.add("loads")
            self.counters.add("load_seconds", age_s)
            self._told.clear()
        return True

    def _give_up(self, load: _Load) -> None:
        load.given_up = True
        if not self._can_drop_loads:
            self._failed_blocks.update(load.plan.target_ids)
        self._received.add(load.plan.request_id)
        self._report.dropped.add(load.plan.request_id)
        self.counters.add("loads_failed")
        _LOG.warning(
            "the cache server has not ended a load after %.0f s; its tokens are computed, its %d blocks stay out of "
            "use until it has",
            self._clock() - load.begun_s,
            len(load.plan.target_ids),
        )

    def _fail_load(self, plan: LoadPlan, error: KVFerryError, failed: Collection[int]) -> None:
        self._failed_blocks.update(failed)
        self._received.add(plan.request_id)
        self._report.add(plan.job_id, failed=True)
        self.counters.add("loads_failed")
        self._tell("a load", error)

    def _end_store(self, store: _Store) -> bool:
        job = store.job
        if not job.done():
            return False
        if job.error is not None:
            self._fail_store(store.plan, job.error)
            return True
        result = job.wait(0.0)
        self._report.add(store.plan.job_id, failed=False)
        self.counters.add("stores")
        self.counters.add("chunks_stored", result.num_stored)
        self.counters.add("chunks_present", result.num_present)
        self.counters.add("chunks_skipped", result.num_skipped)
        return True

    def _fail_store(self, plan: StorePlan, error: KVFerryError) -> None:
        self._report.add(plan.job_id, failed=True)
        self.counters.add("stores_failed")
        self._tell("a store", error)

    def _tell(self, what: str, error: KVFerryError) -> None:
        """Log each kind of failure once, until a load goes well again."""
        kind = f"{what} {type(error).__name__} {getattr(error, 'code', '')}"
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("%s failed, so its tokens are computed, or not kept: %s", what, error)


def _as_ours(error: KVFerryError | ValueError) -> KVFerryError:
    """What no server would take, such as the keys of a prompt of millions of tokens, fails that job alone."""
    return error if isinstance(error, KVFerryError) else RequestError("job", str(error))
