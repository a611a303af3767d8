"""A worker's side: loads that are done when the forward begins, and stores that go on beside the next ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from kvferry.client import CacheClient, Job, RetrieveResult, StoreResult
from kvferry.connectors.trtllm.plans import LoadPlan, StepPlan, StorePlan
from kvferry.errors import DeadlineError, KVFerryError, RequestError

# Beyond the time-out: for the server to fail a job by itself, and to say that a cancelled one moves nothing more.
GRACE_S = 1.0
STUCK_S = 3.0  # a server that has not ended a store after so long is given no other
MAX_STORES = 40  # at one time: a client has 64 events, and would wait for one
_NO_WAY_BACK = "TensorRT-LLM cannot compute it instead, and would go on with what lies there, so the engine must not"
_LOG = logging.getLogger("kvferry.trtllm")


@dataclass(slots=True, eq=False)
class _Store:
    plan: StorePlan
    job: Job[StoreResult]
    begun_s: float


class WorkerSide:
    """The jobs of one rank. One thread, the executor's.

    A load that fails raises, since the forward would use its blocks all the same, and the interface cannot say that it
    must not. Stores are waited for where their blocks may be given away: before the first forward after which their
    request is neither going on, nor finished and kept until `finished` has returned it. Where the engine itself copies
    blocks in between (`copies_blocks`, for partial reuse), no store outlives its step but those of kept requests.
    """

    def __init__(
        self,
        client: CacheClient,
        *,
        load_timeout_s: float,
        copies_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._load_timeout_s = load_timeout_s
        self._copies_blocks = copies_blocks
        self._clock = clock
        self._loads: tuple[LoadPlan, ...] = ()
        self._new_stores: tuple[StorePlan, ...] = ()
        self._going_on: frozenset[int] = frozenset()
        self._broken = ""
        self._waiting: deque[StorePlan] = deque()
        self._stores: list[_Store] = []
        self._kept: set[int] = set()
        self._told: set[str] = set()
        self._stream: int | None = None

    def bind(self, plan: StepPlan) -> None:
        """The step's plan. Nobody takes it back, so each part of it is done once."""
        self._loads, self._new_stores, self._going_on = plan.loads, plan.stores, plan.going_on
        self._broken = plan.broken

    def load(self, stream: int | None) -> None:
        """Do the step's loads; on return their bytes are in place. Raises KVFerryError where one is not, or cannot be.

        The server writes once the work that `stream` has now is done. Blocks of earlier stores that the forward may
        overwrite have been read on return.
        """
        if self._broken:
            raise RequestError("lease", f"{self._broken}. {_NO_WAY_BACK}")
        going_on, self._going_on = self._going_on, frozenset()
        loads, self._loads = self._loads, ()
        self._let_go_of_blocks(going_on | self._kept)
        jobs: list[tuple[LoadPlan, Job[RetrieveResult]]] = []
        try:
            for load in loads:
                jobs.append((load, self._begin_load(load, stream)))
            until = self._clock() + self._load_timeout_s + GRACE_S
            for load, job in jobs:
                self._wait(load, job, until)
        except BaseException:
            for _, job in jobs:
                with contextlib.suppress(KVFerryError):  # the first error says more
                    job.cancel(GRACE_S)
            raise

    def store(self, stream: int | None) -> None:
        """Begin the step's stores; the server reads once the work that `stream` has now is done."""
        self._waiting.extend(self._new_stores)
        self._new_stores, self._stream = (), stream
        self._begin_stores()

    def finished(self, request_ids: Iterable[int]) -> list[int]:
        """Which of the requests that have ended, of this call and earlier ones, have no store left to end."""
        self._kept.update(request_ids)
        if self._copies_blocks:
            self._let_go_of_blocks(self._kept)
        self._end_stores()
        self._begin_stores()
        busy = {store.plan.request_id for store in self._stores} | {plan.request_id for plan in self._waiting}
        ended = self._kept - busy
        self._kept -= ended
        return sorted(ended)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._client.close()

    def _begin_load(self, load: LoadPlan, stream: int | None) -> Job[RetrieveResult]:
        try:
            return self._client.retrieve(
                load.lease_id, load.block_ids, load.skip_tokens, stream=stream, timeout_s=self._load_timeout_s
            )
        except (KVFerryError, ValueError) as error:
            raise _broken(load, error) from error

    def _wait(self, load: LoadPlan, job: Job[RetrieveResult], until: float) -> None:
        try:
            job.wait(max(0.0, until - self._clock()))
        except KVFerryError as error:
            raise _broken(load, error) from error

    def _begin_stores(self) -> None:
        if self._stores and self._clock() - self._stores[0].begun_s > STUCK_S:
            self._waiting.clear()
        while self._waiting and len(self._stores) < MAX_STORES and not self._client.congested:
            plan = self._waiting.popleft()
            tokens = np.frombuffer(plan.tokens, dtype="<i4")
            try:
                job = self._client.store(
                    tokens,
                    plan.block_ids,
                    plan.start_token,
                    context=plan.context,
                    stream=self._stream,
                    timeout_s=self._load_timeout_s,
                )
            except (KVFerryError, ValueError) as error:
                self._tell(error)
            else:
                self._stores.append(_Store(plan, job, self._clock()))

    def _end_stores(self) -> None:
        for store in self._stores:
            if store.job.error is not None:
                self._tell(store.job.error)
        self._stores = [store for store in self._stores if not store.job.done()]

    def _let_go_of_blocks(self, keeping: Collection[int]) -> None:
        """End the stores of other requests: those may have lost their blocks, gone without a word, or begun anew."""
        self._end_stores()
        self._waiting = deque(plan for plan in self._waiting if plan.request_id in keeping)
        left = [store for store in self._stores if store.plan.request_id not in keeping]
        until = self._clock() + self._load_timeout_s + GRACE_S
        for store in left:
            try:
                store.job.wait(max(0.0, until - self._clock()))
            except DeadlineError:
                _stop(store)
            except KVFerryError as error:
                self._tell(error)
        self._end_stores()

    def _tell(self, error: Exception) -> None:
        """Log each kind of failure once."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("a store failed, so its KV is not kept: %s", error)


def _stop(store: _Store) -> None:
    """Raises DeadlineError where the server may still read what is overwritten next, and keep what it reads."""
    try:
        store.job.cancel(GRACE_S)
    except DeadlineError as error:
        raise DeadlineError(
            f"the cache server hangs, and may still read blocks of request {store.plan.request_id}, which has ended "
            f"without a word; the next forward would overwrite them under it ({error}). Restart the server"
        ) from error


def _broken(load: LoadPlan, error: Exception) -> KVFerryError:
    return RequestError(
        getattr(error, "code", "load"),
        f"KV that was promised to request {load.request_id} is not in its {len(load.block_ids)} blocks: {error}. "
        f"{_NO_WAY_BACK}",
    )
