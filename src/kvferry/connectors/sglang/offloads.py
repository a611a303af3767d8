"""Offloads of device pages: begun a few at a time, told in the order in which they came."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.client import CacheClient, Job, StoreResult
from kvferry.errors import KVFerryError
from kvferry.layout import ChunkKeys

# At one time. A client has 64 events and would wait for one, and loads need some, too.
MAX_JOBS = 32
_END_S = 10.0
_LOG = logging.getLogger("sglang.kvferry")


@dataclass(slots=True, eq=False)
class _Offload:
    keys: bytes
    block_ids: Sequence[int]
    came_s: float
    job: Job[StoreResult] | None = None
    result: bool | None = None


class Offloads:
    """The offloads of one rank. The scheduler's thread, which never waits here but in `reset`.

    SGLang keeps a node's pages until it is told how the offload ended. One that has begun is not ended before the
    server has said so: it would read what is another request's by then. So no more than `max_pages` are begun at a
    time, and what cannot begin within `timeout_s` is not kept. The server copies only what it has not.
    """

    def __init__(
        self,
        client: CacheClient,
        *,
        max_pages: int,
        timeout_s: float,
        stream: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._max_pages = max_pages
        self._timeout_s = timeout_s
        self._stream = stream
        self._clock = clock
        self._offloads: deque[_Offload] = deque()
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._offloads)

    def add(self, keys: bytes, block_ids: Sequence[int]) -> None:
        """Keep the pages `block_ids` of the device under `keys`; begun now or soon."""
        self._offloads.append(_Offload(keys, block_ids, self._clock()))
        self._begin()

    def add_done(self) -> None:
        """One for which there is nothing to do."""
        self._offloads.append(_Offload(b"", (), self._clock(), result=True))

    def num_completed(self) -> int:
        """How many of the oldest have ended."""
        self._begin()
        count = 0
        for offload in self._offloads:
            if not self._has_ended(offload):
                break
            count += 1
        return count

    def pop_completed(self) -> bool:
        """Forget the oldest, which has ended; whether its pages are there. Raises IndexError where it has not."""
        if not self._offloads or not self._has_ended(self._offloads[0]):
            raise IndexError("no offload has ended")
        return bool(self._offloads.popleft().result)

    def reset(self) -> None:
        """Stop all, and forget them; nothing is read any more on return."""
        for offload in self._offloads:
            job = offload.job
            while job is not None and not job.done():
                with contextlib.suppress(KVFerryError):
                    job.cancel(_END_S)
                if not job.done():
                    _LOG.error("the cache server is alive and has not stopped a store: waiting for it")
        self._offloads.clear()

    def _begin(self) -> None:
        """Begin what waits, as far as there is room; drop what has waited too long."""
        running = [offload for offload in self._offloads if offload.job is not None and not offload.job.done()]
        num_jobs, num_pages = len(running), sum(len(offload.block_ids) for offload in running)
        for offload in self._offloads:
            if offload.job is not None or offload.result is not None:
                continue
            late = self._clock() - offload.came_s > self._timeout_s
            if late or not self._client.connected:
                offload.result = False
                continue
            fits = num_jobs < MAX_JOBS and (not num_pages or num_pages + len(offload.block_ids) <= self._max_pages)
            if not fits or self._client.congested:
                continue
            self._begin_one(offload)
            num_jobs, num_pages = num_jobs + 1, num_pages + len(offload.block_ids)

    def _begin_one(self, offload: _Offload) -> None:
        try:
            offload.job = self._client.store(
                ChunkKeys(offload.keys), offload.block_ids, stream=self._stream(), timeout_s=self._timeout_s
            )
        except (KVFerryError, ValueError) as error:
            offload.result = False
            self._tell(error)

    def _has_ended(self, offload: _Offload) -> bool:
        job = offload.job
        if offload.result is None and job is not None and job.done():
            if job.error is not None:
                self._tell(job.error)
                offload.result = False
            else:
                offload.result = job.wait(0.0).num_skipped == 0
        return offload.result is not None

    def _tell(self, error: Exception) -> None:
        """Log each kind of failure once."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("an offload failed, so its pages are not kept: %s; this is told once", error)
