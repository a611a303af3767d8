"""Pages of a host pool to and from the cache server, whole or not at all, in bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.client import CacheClient
from kvferry.connectors.sglang.host_pool import HostPages
from kvferry.connectors.sglang.questions import Questions
from kvferry.connectors.sglang.staging import Borrowed, Staging, copy_in, copy_out
from kvferry.errors import DeadlineError, KVFerryError
from kvferry.layout import HASH_BYTES, ChunkKeys

_LOG = logging.getLogger("sglang.kvferry")


class PageStore:
    """One rank's pages. Any thread may; SGLang has one that reads and one that writes.

    No call takes longer than `timeout_s` and what a question may take, whatever the server does, and none raises for
    what a server may do.
    """

    def __init__(
        self,
        client: CacheClient,
        pool: HostPages,
        *,
        staging: Staging,
        questions: Questions,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pool = pool
        self._staging = staging
        self._questions = questions
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._told: set[str] = set()
        self.counters: Counter[str] = Counter()

    def fetch(self, keys: bytes, pages: Sequence[int]) -> int:
        """Fill the pages of the pool, from the first on; how many are filled. The others are as they were."""
        end, at = self._clock() + self._timeout_s, 0
        while at < len(pages) and self._clock() < end:
            with self._staging.for_reads.some(len(pages) - at) as borrowed:
                count = self._fetch_some(keys[at * HASH_BYTES :], pages[at:], borrowed, end - self._clock())
            if not count:
                break
            at += count
        self._count("pages_fetched", at)
        return at

    def keep(self, keys: bytes, pages: Sequence[int], *, before: bytes = b"") -> int:
        """Store the pages of the pool, from the first on; how many are there now.

        `before` is the key of the page before the first, where that is known. Pages that are there are not copied.
        """
        end = self._clock() + self._timeout_s
        at = present = self._questions.count(keys)
        while at < len(pages) and self._clock() < end and self._questions.is_patient:
            before = keys[(at - 1) * HASH_BYTES : at * HASH_BYTES] if at else before
            with self._staging.for_writes.some(len(pages) - at) as borrowed:
                count = self._keep_some(keys[at * HASH_BYTES :], pages[at:], before, borrowed, end - self._clock())
                wanted = len(borrowed.slots)
            at += count
            if count < wanted or not wanted:
                break
        self._count("pages_kept", at - present)
        self._count("pages_present", present)
        return at

    def _fetch_some(self, keys: bytes, pages: Sequence[int], borrowed: Borrowed, timeout_s: float) -> int:
        slots = borrowed.slots
        count, lease_id = self._questions.lookup(keys[: len(slots) * HASH_BYTES])
        if not count:
            return 0
        try:
            borrowed.job = job = self._client.retrieve(lease_id, slots[:count], timeout_s=timeout_s)
            job.wait(timeout_s)
        except (KVFerryError, ValueError) as error:
            self._failed("a load", error)
            return 0
        finally:
            self._questions.release(lease_id)
        copy_out(self._staging, slots[:count], self._pool, pages[:count])
        return count

    def _keep_some(self, keys: bytes, pages: Sequence[int], before: bytes, borrowed: Borrowed, timeout_s: float) -> int:
        slots = borrowed.slots
        if not slots:
            return 0
        copy_in(self._staging, slots, self._pool, pages[: len(slots)])
        keys = keys[: len(slots) * HASH_BYTES]
        stored = self._store(before + keys, slots, borrowed, len(before) // HASH_BYTES, timeout_s)
        if not stored and before and borrowed.job is not None and borrowed.job.error is None:
            stored = self._store(keys, slots, borrowed, 0, timeout_s)  # the page before is gone: a chain of its own
        return stored

    def _store(self, keys: bytes, slots: Sequence[int], borrowed: Borrowed, start: int, timeout_s: float) -> int:
        """How many pages are there; `start` of the keys are those of pages that are not among the slots."""
        try:
            blocks = [0] * start + list(slots)
            start_token = start * self._pool.page_tokens
            borrowed.job = job = self._client.store(ChunkKeys(keys), blocks, start_token, timeout_s=timeout_s)
            done = job.wait(timeout_s)
        except (KVFerryError, ValueError) as error:
            self._failed("a store", error)
            return 0
        return done.num_stored + done.num_present

    def _failed(self, what: str, error: Exception) -> None:
        """Count it; each kind of failure is logged once."""
        if isinstance(error, DeadlineError):
            self._questions.pause()
        kind = f"{what} {type(error).__name__} {getattr(error, 'code', '')}"
        with self._lock:
            told = kind in self._told
            self._told.add(kind)
            self.counters[f"{what.split()[-1]}s_failed"] += 1
        if not told:
            _LOG.warning("%s failed, so its tokens are computed, or not kept: %s; this is told once", what, error)

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self.counters[name] += count
